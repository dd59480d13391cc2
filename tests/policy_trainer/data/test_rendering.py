"""Texts that have been through a chat template, what tokenizers add to texts, and templates that never finish."""

import re
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import ByT5Tokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import PromptConfig
from policy_trainer.data import rendering
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder, UnusablePrompt
from policy_trainer.data.rendering import (
    TemplateRefusal,
    encode,
    end_of_answer,
    load_prompt_tokenizer,
    render,
    use_chat_template,
)
from shared.errors import UserError

# Llama 2's and Vicuna's templates, and an early one of Mistral: none opens an answer with a special token.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = 'A chat between a curious user and an assistant.' %}{% set rest = messages %}{% endif %}"
    "{{ bos_token + system }}{% for message in rest %}"
    "{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + message['content'] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
TRL = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
TEMPLATES = {file.stem: file.read_text() for file in sorted(TRL.glob("*.jinja")) if "training" not in file.stem}
TEMPLATES |= {"llama2": LLAMA2, "vicuna": VICUNA, "mistral": MISTRAL}

QUESTION = {"role": "user", "content": "1+1=?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "2"}


def llama(**options: Any) -> LlamaTokenizerFast:
    """A Llama tokenizer whose tokens are single characters."""
    characters = sorted(set("".join(map(chr, range(33, 127)))))
    names = ["<unk>", "<s>", "</s>", "▁", *characters]
    return LlamaTokenizerFast(vocab={name: place for place, name in enumerate(names)}, merges=[], **options)


def ready(template: str, *, own_tokens: bool) -> PreTrainedTokenizerFast:
    """own_tokens: whether what looks like a control token in the template is ordinary text."""
    tokenizer = make_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    tokenizer.chat_template = template
    if own_tokens:
        tokenizer.add_tokens(sorted(set(re.findall(r"<[^<>\s'\"]+>", template))))
    return tokenizer


@pytest.mark.parametrize("own_tokens", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_is_recognised_by_its_beginning_and_its_end(name: str, own_tokens: bool) -> None:
    tokenizer = ready(TEMPLATES[name], own_tokens=own_tokens)
    encoder = PromptEncoder(tokenizer, PromptConfig())

    def rendered(*messages: dict[str, Any]) -> str:
        blocks = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        return render(tokenizer, blocks if encoder._wants_blocks else messages, add_generation_prompt=True)

    def in_chat(text: str) -> bool:
        return encoder.in_chat(Problem("", ({"role": "user", "content": text},), text))

    text = rendered(QUESTION)
    texts = [
        text,
        rendered(QUESTION, ANSWER, QUESTION),
        text + "Sure",
        text + "<think>\n",
        text.removeprefix("<s>"),
        text.strip(),
    ]
    with suppress(TemplateRefusal):  # some take no system message
        texts.append(rendered(SYSTEM, QUESTION))
    assert not any(map(in_chat, texts))
    opening = text[text.index("1+1=?") + 5 :].strip()
    assert all(map(in_chat, ["1+1=?", f"What does '{opening}' mean?", f"Say {opening}", f"{opening}, you say"]))


def test_a_template_that_takes_only_conversations_with_a_system_message() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + '[end]' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    rendered = render(tokenizer, [SYSTEM, QUESTION], add_generation_prompt=True)
    encoder = PromptEncoder(tokenizer, PromptConfig())
    assert not encoder.in_chat(Problem("", (QUESTION,), rendered)) and encoder.in_chat(
        Problem("", (QUESTION,), "1+1=?")
    )


def test_a_template_that_writes_no_content_surrounds_nothing() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "Always the same."
    assert PromptEncoder(tokenizer, PromptConfig()).in_chat(Problem("", (QUESTION,), "Always the same."))


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ 1 + 'a' }}", "{{ 1 // 0 }}", "{{ 'a'.index('b') }}", "{{ x.y.z }}"]
)
def test_what_a_template_does_not_take_is_one_error_whatever_it_raises(template: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    question = {"role": "user", "content": "many words " * 10_000}
    with pytest.raises(TemplateRefusal, match=r"the model's chat template does not accept .* …: ") as refused:
        render(tokenizer, [question])
    assert len(str(refused.value)) < 700
    with pytest.raises(UnusablePrompt, match=r"^rows\.jsonl:3: the model's chat template does not accept"):
        PromptEncoder(tokenizer, PromptConfig()).encode(Problem("", (question,), where="rows.jsonl:3"))


class TestBOS:
    @pytest.mark.parametrize("style", ["chat", "plain"])
    @pytest.mark.parametrize("text", ["<s>[INST] q [/INST]", "[INST] q [/INST]"])
    def test_stands_once_in_front(self, style: Any, text: str) -> None:
        tokenizer = llama(add_bos_token=True)
        tokenizer.chat_template = LLAMA2
        problem = Problem("", ({"role": "user", "content": text},), text)
        ids = PromptEncoder(tokenizer, PromptConfig(prompt_style=style)).encode(problem).ids
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert tokens[0] == "<s>" and tokens.count("<s>") == 1
        assert "".join(tokens[1:]).replace("▁", " ").strip() == "[INST] q [/INST]"

    def test_is_not_added_to_a_rendered_text_whose_template_writes_none(self) -> None:
        tokenizer = llama(add_bos_token=True)
        tokenizer.chat_template = LLAMA2.replace("bos_token + ", "")
        text = "[INST] q [/INST]"
        ids = PromptEncoder(tokenizer, PromptConfig()).encode(Problem("", (QUESTION,), text)).ids
        assert tokenizer.bos_token_id not in ids
        plain = PromptEncoder(tokenizer, PromptConfig()).encode(Problem("", prompt="q")).ids
        assert plain[0] == tokenizer.bos_token_id


class TestEOS:
    @pytest.mark.parametrize("tokenizer", [ByT5Tokenizer(), llama(add_eos_token=True, add_bos_token=True)])
    def test_is_never_in_a_prompt(self, tokenizer: Any) -> None:
        assert tokenizer.encode("q")[-1] == tokenizer.eos_token_id
        for config, problem in [
            (PromptConfig(prompt_style="plain"), Problem("", (QUESTION,))),
            (PromptConfig(), Problem("", prompt="q")),
        ]:
            ids = PromptEncoder(tokenizer, config).encode(problem).ids
            assert ids and tokenizer.eos_token_id not in ids

    def test_stays_behind_a_text_that_is_whole(self) -> None:
        tokenizer = llama(add_eos_token=True, add_bos_token=True)
        assert encode(tokenizer, "q", back=True) == tokenizer.encode("q")
        assert [tokenizer.bos_token_id, *encode(tokenizer, "<s>q", back=True)] == tokenizer.encode("<s>q")


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


class TestTemplateThatNeverEnds:
    def test_is_interrupted_and_no_row_is_to_blame(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rendering, "_SECONDS", 0.2)
        tokenizer, before = make_tokenizer(), (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL))
        tokenizer.chat_template = ENDLESS
        with pytest.raises(
            UserError, match=r"the model's chat template takes more than 0\.2 s for one conversation"
        ) as slow:
            PromptEncoder(tokenizer, PromptConfig()).encode(Problem("", (QUESTION,)))
        assert not isinstance(slow.value, UnusablePrompt)
        after = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
        assert after[0] is before[0] and bool(after[1][0]) == bool(before[1][0])  # set by pytest's own time limit

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("template", "thread"), [("{{ 9 ** (9 ** 9) }}", "call()"), (ENDLESS, "t.start(); t.join()")]
    )
    def test_ends_the_process_where_nothing_interrupts_it(self, template: str, thread: str) -> None:
        """In native code, or outside the main thread."""
        program = (
            "import threading; from policy_trainer.data import rendering\n"
            "from policy_trainer.cli.demo.base_model import make_tokenizer\n"
            "rendering._SECONDS = 0.2; tokenizer = make_tokenizer()\n"
            f"tokenizer.chat_template = {template!r}\n"
            "call = lambda: rendering.render(tokenizer, [{'role': 'user', 'content': 'q'}])\n"
            f"t = threading.Thread(target=call); {thread}"
        )
        ended = run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert ended.returncode == 1 and "Timeout" in ended.stderr and "render" in ended.stderr


ROLES = "{% for m in messages %}<|{{ m.role }}|>"
BLOCKS = ROLES + "{% for block in m.content %}{{ block.text }}{% endfor %}<|end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (ROLES + "{{ m.content }}<|end|>{% endfor %}", "<|end|>"),
        (ROLES + "{{ m.content }}\n{% endfor %}", None),
        (BLOCKS, "<|end|>"),  # as templates for pictures, which write nothing of a text
        (ROLES + "<|end|>{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_what_a_template_ends_an_answer_with(template: str | None, end: str | None) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert end_of_answer(tokenizer) == (end and tokenizer.convert_tokens_to_ids(end))


class TestTemplateOfTheUser:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_takes_the_place_of_the_model_s(self, name: str, tmp_path: Path) -> None:
        """Templates that people have: those that TRL ships, and old ones."""
        file = tmp_path / "chat_template.jinja"
        file.write_text(TEMPLATES[name], encoding="utf-8")
        tokenizer, expected = (ready("{{ 'another' }}", own_tokens=True) for _ in range(2))
        expected.chat_template = TEMPLATES[name]
        use_chat_template(tokenizer, PromptConfig(chat_template=file))
        messages = [SYSTEM, QUESTION]
        try:
            text = expected.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError:  # it takes no system message
            messages = [QUESTION]
            text = expected.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert render(tokenizer, messages, add_generation_prompt=True) == text

    def test_is_saved_with_the_tokenizer(self, tmp_path: Path) -> None:
        text = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
        (tmp_path / "mine.jinja").write_text(text, encoding="utf-8-sig")  # some editors write the mark
        ready(VICUNA, own_tokens=False).save_pretrained(tmp_path / "model")
        prompts = PromptConfig(chat_template=tmp_path / "mine.jinja")
        loaded = load_prompt_tokenizer(str(tmp_path / "model"), prompts, revision=None)
        assert render(loaded, [QUESTION]) == "<1+1=?>"
        loaded.save_pretrained(tmp_path / "trained")
        again = load_prompt_tokenizer(str(tmp_path / "trained"), PromptConfig(), revision=None)
        assert render(again, [QUESTION]) == "<1+1=?>"

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (None, "cannot be read: No such file or directory"),
            (b"\xff\xfe{{ 1 }}", "cannot be read: it is not a text in UTF-8"),
            (b"Answer briefly.", "is not a Jinja template"),
            (b'{"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}', "is not a Jinja template"),
            (b"{% for m in messages %}\n{{ m.content }}\n{% endfr %}", "mine.jinja, line 3: .*endfr"),
        ],
    )
    def test_what_is_refused(self, content: bytes | None, problem: str, tmp_path: Path) -> None:
        file = tmp_path / "mine.jinja"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(UserError, match=f"data.chat_template: .*{problem}"):
            use_chat_template(ready(VICUNA, own_tokens=False), PromptConfig(chat_template=file))

    def test_that_never_ends_is_interrupted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rendering, "_SECONDS", 0.2)
        (tmp_path / "mine.jinja").write_text(ENDLESS)
        with pytest.raises(UserError, match="chat template takes more than"):
            use_chat_template(make_tokenizer(), PromptConfig(chat_template=tmp_path / "mine.jinja"))

    def test_is_used_by_all_who_render_prompts(self) -> None:
        """They load the tokenizer by `load_prompt_tokenizer`. The others render nothing of the policy's with it."""
        package = Path(rendering.__file__).parents[1]
        files = {
            str(file.relative_to(package)) for file in package.rglob("*.py") if " load_tokenizer" in file.read_text()
        }
        assert files == {
            "data/rendering.py", "supervised/training.py", "rewards/reward_model.py", "learner/ranks/export.py",
            "learner/ranks/lead.py", "cli/demo/vision_model.py", "trl/objects.py",
        }  # fmt: skip
