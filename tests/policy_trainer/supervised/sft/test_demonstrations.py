"""Lines of a file as rows: which tokens are trained on, and which lines are refused."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer, PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import SftConfig
from policy_trainer.supervised.sft import load_demonstrations, read_demonstrations, split
from policy_trainer.supervised.training import RowSet
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.settings import from_values
from tests.docs.pages import texts as texts_of

USER = {"role": "user", "content": "1+2=?"}
SHORT = {"prompt": "a", "completion": "b"}
ANSWER = {"role": "assistant", "content": "3"}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


@pytest.fixture
def load(
    make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, write: Callable[..., Path]
) -> Callable[..., RowSet]:
    """All lines are training rows; another line is held out."""

    def load(
        *lines: Any,
        eval_lines: Any = SHORT,
        note: Callable[[str], None] = print,
        data: dict[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerFast = tokenizer,
        vocabulary: int = len(tokenizer),
        **changes: Any,
    ) -> RowSet[TokenGroup]:
        paths = {"path": write(*lines), "eval_path": write(eval_lines, name="eval_lines.jsonl")}
        config = from_values(SftConfig, model="none", data={**paths, **(data or {})}, **changes)
        # A copy, since data.chat_template changes it.
        return load_demonstrations(config, make_tiny(vocabulary=vocabulary), deepcopy(tokenizer), note)

    return load


def texts(row: TokenGroup, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    return str(tokenizer.decode(row.prompt_ids.tolist())), str(tokenizer.decode(row.completion_ids.tolist()))


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"prompt": "1+2=", "completion": "3"}, "1+2="),
        ({"messages": [USER], "completion": "3"}, "<|user|>1+2=?<|end|><|assistant|>"),
        ({"messages": [USER, ANSWER]}, "<|user|>1+2=?<|end|><|assistant|>"),
        (
            {"messages": [USER, ANSWER, USER, ANSWER], "source": "elsewhere"},
            "<|user|>1+2=?<|end|><|assistant|>3<|end|><|user|>1+2=?<|end|><|assistant|>",
        ),
    ],
)
def test_a_line_is_a_prompt_and_a_completion_with_its_end(
    load: Callable[..., RowSet[TokenGroup]], tokenizer: PreTrainedTokenizerFast, line: Any, prompt: str
) -> None:
    (row,) = load(line).rows
    assert texts(row, tokenizer) == (prompt, "3<|end|>")
    assert row.completion_ids[-1] == tokenizer.eos_token_id
    assert row.size == 1


def test_prompts_are_encoded_as_in_a_run(load: Callable[..., RowSet[TokenGroup]], tokenizer: Any) -> None:
    data = {"system_prompt": "Be brief.", "assistant_prefill": "<think>"}
    (row,) = load({"messages": [USER, ANSWER]}, eval_lines={"messages": [USER, ANSWER]}, data=data).rows
    prompt = "<|system|>Be brief.<|end|><|user|>1+2=?<|end|><|assistant|><think>"
    assert texts(row, tokenizer) == (prompt, "3<|end|>")
    (row,) = load({"messages": [USER, ANSWER]}, data={"prompt_style": "plain"}).rows
    assert texts(row, tokenizer) == ("1+2=?", "3<|end|>")


def test_a_template_of_the_user_s(load: Callable[..., RowSet[TokenGroup]], tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<|user|><|user|>{{ m.content }}{% endfor %}")
    data, line = {"chat_template": tmp_path / "mine.jinja"}, {"messages": [USER, ANSWER]}
    (row,) = load(line, data=data).rows
    assert texts(row, tokenizer) == ("<|user|><|user|>1+2=?", "3<|end|>")
    with pytest.raises(UserError, match=r"data\.chat_template: no demonstration has messages"):
        load({"prompt": "1+2=", "completion": "3"}, data=data)


def test_a_prompt_has_no_eos_that_the_tokenizer_appends(
    make_tiny: Callable[..., PreTrainedModel], write: Callable[..., Path]
) -> None:
    path, tokenizer = write(SHORT, {"prompt": "c", "completion": "d"}), ByT5Tokenizer()
    config = from_values(SftConfig, model="none", data={"path": path})
    (row,) = load_demonstrations(config, make_tiny(vocabulary=len(tokenizer)), tokenizer, print).rows
    assert row.prompt_ids.tolist() == tokenizer.encode("c", add_special_tokens=False)
    assert row.completion_ids.tolist() == tokenizer.encode("d")


def test_a_completion_ends_with_a_token_that_samplers_stop_at(
    make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, write: Callable[..., Path]
) -> None:
    """The tokenizer's eos id, or the model's where samplers do not stop at the tokenizer's."""
    path = write({"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"})
    config = from_values(SftConfig, model="none", data={"path": path})
    model = make_tiny(vocabulary=len(tokenizer))
    for ends, end in (([7, 9], 7), ([0, 1], 1)):
        model.generation_config.eos_token_id = ends  # type: ignore[union-attr]
        data = load_demonstrations(config, model, tokenizer, print)
        assert data.rows[0].completion_ids[-1] == end


CHAT = "{% for m in messages %}<|user|>{{ m.content }}{{ '<|assistant|>' if m.role == 'assistant' }}{% endfor %}"


def test_in_a_chat_a_completion_ends_as_the_template_ends_answers(
    make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, write: Callable[..., Path]
) -> None:
    """The saved model stops there, as a base model with the template of a chat model must learn to."""
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = CHAT
    path = write({"messages": [USER, ANSWER]}, {"prompt": "c", "completion": "d"}, {"prompt": "e", "completion": "f"})
    config = from_values(SftConfig, model="none", data={"path": path, "eval_path": path})
    model, end = make_tiny(vocabulary=len(tokenizer)), tokenizer.convert_tokens_to_ids("<|assistant|>")
    model.generation_config.eos_token_id = tokenizer.eos_token_id  # type: ignore[union-attr]
    notes: list[str] = []
    rows = load_demonstrations(config, model, tokenizer, notes.append).rows
    assert [row.completion_ids[-1] for row in rows] == [end, tokenizer.eos_token_id, tokenizer.eos_token_id]
    assert model.generation_config.eos_token_id == sorted([tokenizer.eos_token_id, end])  # type: ignore[union-attr]
    assert f"the chat template ends an answer with <|assistant|> ({end}), at which the model did not stop" in notes[0]
    notes.clear()
    load_demonstrations(config, model, tokenizer, notes.append)
    assert len(notes) == 1 and notes[0].startswith("demonstrations: ")


def test_a_model_that_stops_only_at_the_eos_of_its_tokenizer(
    make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, write: Callable[..., Path]
) -> None:
    """Plain prompts change nothing, whatever the template is."""
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = CHAT
    model, path = make_tiny(vocabulary=len(tokenizer)), write(SHORT, {"prompt": "c", "completion": "d"})
    before = model.generation_config.eos_token_id  # type: ignore[union-attr]
    load_demonstrations(from_values(SftConfig, model="none", data={"path": path}), model, tokenizer, print)
    assert model.generation_config.eos_token_id == before  # type: ignore[union-attr]


class TestTooLong:
    LINES = ({"prompt": "abc", "completion": "def"}, {"prompt": "abcd", "completion": "def"})

    def test_is_dropped_and_counted(self, load: Callable[..., RowSet[TokenGroup]]) -> None:
        notes: list[str] = []
        data = load(*self.LINES, note=notes.append, max_length=7)
        assert [row.tokens for row in data.rows] == [7]
        assert notes == ["demonstrations: 1 to train on, of 7 tokens; 1 held out; 1 dropped as too long"]

    def test_is_refused_with_too_long_refuse(self, load: Callable[..., RowSet[TokenGroup]]) -> None:
        with pytest.raises(UserError, match=r"data\.jsonl:2: has 8 tokens and may have 7: max_length"):
            load(*self.LINES, data={"too_long": "refuse"}, max_length=7)

    def test_is_longer_than_the_models_context(self, load: Callable[..., RowSet[TokenGroup]]) -> None:
        with pytest.raises(UserError, match="has 129 tokens and may have 128"):
            load({"prompt": "a" * 120, "completion": "b" * 8}, data={"too_long": "refuse"})
        assert load({"prompt": "a" * 120, "completion": "b" * 7}).rows[0].tokens == 128

    def test_when_nothing_is_left(self, load: Callable[..., RowSet[TokenGroup]]) -> None:
        with pytest.raises(UserError, match="no demonstration is left"):
            load(*self.LINES, max_length=6)
        with pytest.raises(UserError, match="no held-out demonstration is left"):
            load({"prompt": "a", "completion": "b"}, eval_lines={"prompt": "ab", "completion": "b"}, max_length=3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ({"completion": "3"}, "must be"),
        ({"prompt": "1", "messages": [USER], "completion": "3"}, "must be"),
        ({"prompt": "1"}, "completion must be a text"),
        ({"prompt": "", "completion": "3"}, "prompt must be a text"),
        (r'{"prompt": "a", "completion": "\ud800"}', "completion has .*: half a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "\ud800"}], "completion": "b"}', "content of messages has"),
        ({"messages": [USER]}, "must end with an assistant message"),
        ({"messages": [ANSWER]}, "must end with an assistant message"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "must end with an assistant message"),
    ],
)
def test_refusals_name_file_and_line(write: Callable[..., Path], line: Any, message: str) -> None:
    path = write({"prompt": "a", "completion": "b"}, "", line)
    with pytest.raises(UserError, match=message) as refusal:
        read_demonstrations(path, "data.path")
    assert str(refusal.value).startswith(f"{path}:3: ")


def test_a_template_that_does_not_take_a_line(
    load: Callable[..., RowSet[TokenGroup]], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(UserError, match=r"data\.jsonl:1: .*chat template"):
        load({"messages": [USER, ANSWER]})


@pytest.mark.parametrize("line", [{"prompt": "<new>", "completion": "1"}, {"prompt": "1", "completion": "<new>"}])
def test_a_token_that_the_model_has_no_row_for(
    load: Callable[..., RowSet[TokenGroup]], tokenizer: PreTrainedTokenizerFast, line: Any
) -> None:
    model_rows = len(tokenizer)
    longer = deepcopy(tokenizer)
    longer.add_tokens(["<new>"])
    with pytest.raises(
        UserError, match=rf"data\.jsonl:2: .*<new> has id {model_rows}, but .* embedding has only {model_rows} rows"
    ):
        load(SHORT, line, tokenizer=longer, vocabulary=model_rows)


def test_every_tenth_line_is_held_out_with_all_of_its_prompt(write: Callable[..., Path]) -> None:
    notes: list[str] = []
    lines = [{"prompt": str(i % 25), "completion": str(i)} for i in range(50)]
    train, eval_lines = split(from_values(SftConfig, model="none", data={"path": write(*lines)}).data, notes.append)
    assert [item.completion for item in eval_lines] == ["0", "10", "20", "30", "40"]
    prompts = {item.problem.prompt for item in eval_lines}
    assert prompts == {"0", "10", "20", "5", "15"}
    assert [item.completion for item in train] == [str(i) for i in range(50) if str(i % 25) not in prompts]
    assert [note.partition(",")[0].partition(" has ")[2] for note in notes] == ["50 rows: 5 of them are left out"]
    split(from_values(SftConfig, model="none", data={"path": write(*lines[:25])}).data, notes.append)
    assert len(notes) == 1, "no prompt is there twice"


def test_the_examples_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lines,) = texts_of("sft.md", "json")
    (tmp_path / "lines.jsonl").write_text(lines)
    completions = [item.completion for item in read_demonstrations(tmp_path / "lines.jsonl", "data.path")]
    assert completions == ["7", "<think>2+3=5</think><answer>5</answer>", "5"]
    monkeypatch.chdir(tmp_path)
    exec(texts_of("sft.md", "python")[0], {})
    assert (tmp_path / "runs/sums/random/model.safetensors").exists()
    assert len(read_demonstrations(tmp_path / "runs/sums/worked.jsonl", "data.path")) == 6000


def test_pictures_are_refused(tmp_path: Path) -> None:
    """They would be left out, and the answers would be learned without them."""
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "What?", "completion": "A cat.", "images": ["a.png"]}\n')
    with pytest.raises(UserError, match=r"data\.path: .*d\.jsonl has pictures \(images\), which sft does not train on"):
        read_demonstrations(file, "data.path")
