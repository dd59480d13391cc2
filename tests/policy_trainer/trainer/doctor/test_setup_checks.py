"""Versions outside of the ranges, a device that is not there, a memory that is too small; broken weights, another end
of answers, prompts that do not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.data.pictures import encode
from policy_trainer.trainer.doctor import setup_checks
from policy_trainer.trainer.doctor.findings import Verdict
from policy_trainer.trainer.doctor.setup_checks import devices, ends, memory, prompts, versions, vocabulary, weights
from shared.errors import UserError
from shared.models import save_model
from tests.policy_trainer.data.tasks.formats import write
from tests.policy_trainer.trainer.doctor.subjects import looked, verdicts
from tests.policy_trainer.vision_models import picture, save_vision_model


def test_versions_that_fit_are_named(model: Path) -> None:
    [finding] = looked(versions, model)
    assert finding.verdict is Verdict.OK
    assert "torch 2." in finding.seen and "transformers " in finding.seen and "Python 3." in finding.seen


def test_versions_that_do_not_fit_are_wrong(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=999", "no-such-library>=1", "rich>=14", "vllm>=999; extra == 'vllm'"]
    monkeypatch.setattr(setup_checks, "requires", lambda name: needed)
    findings = looked(versions, model)
    assert verdicts(findings) == [Verdict.WRONG, Verdict.WRONG]
    assert findings[0].seen.startswith("numpy ") and findings[0].remedy == "pip install 'numpy>=999'"
    assert "no-such-library is not installed" in findings[1].seen


def test_a_device_that_is_not_there(model: Path) -> None:
    with pytest.raises(UserError, match=r"^device: there is no cuda:77 here"):
        looked(devices, model, device="cuda:77")
    with pytest.raises(UserError, match=r"^device: there is no cuda:77 here"):
        looked(devices, model, reference={"device": "cuda:77"})
    assert verdicts(looked(devices, model, reference={"device": "cuda:77"}, server="http://gpu:8400")) == [Verdict.OK]


def test_a_driver_without_a_pytorch_for_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(setup_checks, "_DRIVER", driver)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    findings = looked(devices, model)
    assert verdicts(findings) == [Verdict.WARNING, Verdict.OK]
    assert "finds no GPU" in findings[0].seen and "install PyTorch" in findings[0].remedy


def test_a_model_that_is_too_large(tmp_path: Path) -> None:
    large = Qwen2Config(hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64)
    large.save_pretrained(tmp_path / "large")
    make_tokenizer().save_pretrained(tmp_path / "large")
    [finding] = looked(memory, tmp_path / "large")
    assert finding.verdict is Verdict.WRONG and "main memory has" in finding.seen
    assert "--dtype bfloat16" in finding.remedy


def test_a_small_model_that_only_long_completions_would_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2-135M: weights, gradients and AdamW take 2.2 GB, the activations of a full micro-batch 24."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    Qwen2Config(**sizes, **heads).save_pretrained(tmp_path / "small")
    make_tokenizer().save_pretrained(tmp_path / "small")
    for size, verdict in ((8, Verdict.WARNING), (2, Verdict.WRONG)):
        monkeypatch.setattr("policy_trainer.trainer.plan.memory_size", lambda place, gpu, size=size: size * 10**9)
        finding = looked(
            memory,
            tmp_path / "small",
            groups_per_step=32,
            micro_batch_tokens=10**6,
            sampling={"max_completion_length": 1000},
        )[0]
        assert finding.verdict is verdict and "main memory has" in finding.seen
        assert ("if all completions have the maximum length" in finding.seen) is (verdict is Verdict.WARNING)


def test_a_model_whose_sizes_are_unknown_has_no_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy_trainer.trainer.memory.layers_of", lambda model: 1 / 0)
    [finding] = looked(memory, model)
    assert finding.verdict is Verdict.WARNING and "memory needs are unknown: ZeroDivisionError" in finding.seen


def test_a_model_that_fits_beside_other_programs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"data": {"max_prompt_length": 32}}
    assert verdicts(looked(memory, model, **lengths)) == [Verdict.OK]
    monkeypatch.setattr(setup_checks, "_free", lambda place: 1000)
    [finding] = looked(memory, model, **lengths)
    assert finding.verdict is Verdict.WARNING and "0.0 of" in finding.seen


@pytest.fixture
def save(make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Any:
    """Saves a tiny model after a change to it."""

    def save(change: Callable[[Any, Any], None] = lambda model, tokenizer: None, **options: Any) -> Path:
        model, changed_tokenizer = make_tiny(**{"vocabulary": len(tokenizer), **options}), make_tokenizer()
        change(model, changed_tokenizer)
        save_model(model, changed_tokenizer, tmp_path / "changed")
        return tmp_path / "changed"

    return save


def test_a_model_that_is_right(model: Path) -> None:
    [about] = looked(vocabulary, model)
    assert about.verdict is Verdict.OK and "Qwen2ForCausalLM" in about.seen and "context 128" in about.seen
    [loaded] = looked(weights, model)
    assert loaded.verdict is Verdict.OK and "float32 on cpu" in loaded.seen
    [end] = looked(ends, model)
    assert end.seen == "sampling stops at <|end|> (1), as the chat template does"
    first, lengths = looked(prompts, model)
    assert "through the chat template: '<|user|>50+49=?<|end|><|assistant|>'" in first.seen
    assert lengths.seen == "200 prompts have 8 to 10 tokens; the limit is 116"
    assert looked(prompts, model, data={"max_prompt_length": 10})[-1].verdict is Verdict.OK


def test_the_way_of_the_first_prompts(model: Path, tmp_path: Path) -> None:
    rendered = {"prompt": "<|user|>1+1=?<|end|><|assistant|>", "answer": "2"}
    through, stands = "through the chat template", "as it stands, already in the chat template's form"
    path = write(tmp_path / "rendered", rendered)
    [first, _] = looked(prompts, model, task="jsonl", data={"path": path, "eval_path": path})
    assert first.seen.startswith(f"the first goes {stands}: '<|user|>1+1=?<|end|><|assistant|>'")
    path = write(tmp_path / "mixed", rendered, {"prompt": "1+2=?", "answer": "3"})
    [first, _] = looked(prompts, model, task="jsonl", data={"path": path, "eval_path": path})
    assert through in first.seen and stands in first.seen and "; the next: " in first.seen
    path = write(tmp_path / "plain", {"prompt": "1+2=?", "answer": "3"})
    data = {"path": path, "eval_path": path, "prompt_style": "plain"}
    assert "the first goes as plain text: '1+2=?'" in looked(prompts, model, task="jsonl", data=data)[0].seen


def test_weights_that_are_not_finite(save: Any) -> None:
    def breaks(model: Any, _: Any) -> None:
        model.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] = float("nan")

    [finding] = looked(weights, save(breaks))
    assert finding.verdict is Verdict.WRONG and "model.layers.1.mlp.up_proj.weight" in finding.seen


def test_a_directory_without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"^model: .* cannot be loaded"):
        looked(weights, model)


def test_no_eos_token(save: Any) -> None:
    def forgets(model: Any, tokenizer: Any) -> None:
        model.config.eos_token_id = None
        model.generation_config.eos_token_id = None
        tokenizer.eos_token = None

    with pytest.raises(UserError, match=r"no EOS token; set eos_token_id"):
        looked(vocabulary, save(forgets))


def test_an_eos_token_beyond_the_vocabulary(save: Any) -> None:
    with pytest.raises(UserError, match="has id 400, but the model's embedding"):
        looked(vocabulary, save(eos=400))


def test_a_chat_template_that_ends_answers_otherwise(save: Any) -> None:
    directory = save(eos=0)
    [end] = looked(ends, directory)
    assert end.seen == "sampling stops at <|pad|> (0)"
    finding, *_ = looked(prompts, directory)
    assert finding.verdict is Verdict.WARNING
    assert "ends an answer with <|end|> (1), but sampling stops only at <|pad|> (0)" in finding.seen
    assert finding.remedy.endswith("generation_config.json to [0, 1], or give --sampling.stop-token-ids 1")
    plain, short = {"data": {"prompt_style": "plain"}}, {"max_completion_length": 32}
    for settings in ({"sampling": {**short, "stop_token_ids": [1]}}, {"sampling": short, **plain}):
        assert not any("ends an answer" in finding.seen for finding in looked(prompts, directory, **settings))


def test_no_chat_template(save: Any) -> None:
    directory = save(lambda model, tokenizer: setattr(tokenizer, "chat_template", None))
    with pytest.raises(UserError, match=r"no chat template; .*--data.prompt-style plain"):
        looked(prompts, directory)
    assert verdicts(looked(prompts, directory, data={"prompt_style": "plain"})) == [Verdict.OK, Verdict.OK]


def test_a_chat_template_without_a_generation_prompt(save: Any) -> None:
    template = "{% for message in messages %}{{ message['content'] + '<|end|>' }}{% endfor %}"
    findings = looked(prompts, save(lambda model, tokenizer: setattr(tokenizer, "chat_template", template)))
    assert verdicts(findings) == [Verdict.WARNING, Verdict.OK, Verdict.OK]
    assert "add_generation_prompt" in findings[0].seen


def test_a_chat_template_that_fails_inside_its_program_on_an_answer(save: Any) -> None:
    template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ 1 + 'a' }}{% endif %}"
        "{{ message['content'] + '<|end|>' }}{% endfor %}"
    )
    directory = save(lambda model, tokenizer: setattr(tokenizer, "chat_template", template))
    assert verdicts(looked(ends, directory)) == [Verdict.OK]


def test_calls_whose_arguments_are_json_texts(save: Any, tmp_path: Path) -> None:
    """As OpenAI's API writes them, for a template that takes objects."""
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}{{ call.function.name }}"
        "{% for name, value in call.function.arguments.items() %}{{ name }}{% endfor %}{% endfor %}"
        "{{ message['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    directory = save(lambda model, tokenizer: setattr(tokenizer, "chat_template", template))
    calls = [{"type": "function", "function": {"name": "1+1", "arguments": '{"1": 1}'}}]
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "tool_calls": calls}]
    file = write(tmp_path / "p.jsonl", *[{"prompt": [*messages, messages[0]], "answer": "1"}] * 2)
    settings = {"path": str(file), "eval_path": str(file), "system_prompt": ""}
    assert verdicts(looked(prompts, directory, task="jsonl", data=settings)) == [Verdict.OK, Verdict.OK]


@pytest.mark.parametrize(
    ("limit", "too_long", "verdict"),
    [(9, "drop", Verdict.WARNING), (9, "refuse", Verdict.WRONG), (2, "drop", Verdict.WRONG)],
)
def test_prompts_that_are_too_long(model: Path, limit: int, too_long: str, verdict: Verdict) -> None:
    finding = looked(prompts, model, data={"max_prompt_length": limit, "too_long": too_long})[-1]
    assert finding.verdict is verdict and f"the limit is {limit}" in finding.seen
    assert finding.remedy.startswith("--data.max-prompt-length 10")


def test_prompts_that_the_context_has_no_room_for(model: Path) -> None:
    finding = looked(prompts, model, sampling={"max_completion_length": 120})[-1]
    assert finding.verdict is Verdict.WARNING and "the limit is 8" in finding.seen
    assert "--sampling.max-completion-length" in finding.remedy


def test_a_prompt_with_a_token_that_the_model_lacks(save: Any) -> None:
    with pytest.raises(UserError, match="the model's embedding has only 6 rows"):
        looked(prompts, save(vocabulary=6))


def test_rows_that_make_no_prompt(tmp_path: Path) -> None:
    directory = save_vision_model("qwen2_5_vl", tmp_path / "model")
    (tmp_path / "thin.png").write_bytes(encode(picture(3000, 10)))
    rows: list[dict[str, Any]] = [{"prompt": str(number), "answer": "1"} for number in range(6)]
    rows[4]["image"] = "thin.png"
    file = write(tmp_path / "p.jsonl", *rows)
    *_, unusable, lengths = looked(prompts, directory, task="jsonl", data={"path": str(file), "eval_path": str(file)})
    assert unusable.verdict is Verdict.WARNING
    assert (
        "1 of 6 problems have unusable prompts and will be left out: " in unusable.seen
        and "p.jsonl:5: " in unusable.seen
    )
    assert lengths.seen.startswith("5 prompts have ")
    file = write(tmp_path / "p.jsonl", *[rows[4]] * 5, rows[0])
    *_, unusable, lengths = looked(prompts, directory, task="jsonl", data={"path": str(file), "eval_path": str(file)})
    assert "5 of 6 problems have unusable prompts" in unusable.seen and lengths.seen.startswith("1 prompts have ")


def test_pictures_and_their_tokens(tmp_path: Path) -> None:
    directory = save_vision_model("qwen2_5_vl", tmp_path / "model")
    (tmp_path / "a.png").write_bytes(encode(picture(60, 90)))
    rows = [{"prompt": "1", "answer": "1", "images": ["a.png"] * count} for count in (1, 2, 1, 2)]
    file = write(tmp_path / "p.jsonl", *rows)
    findings = looked(prompts, directory, task="jsonl", data={"path": str(file), "eval_path": str(file)})
    assert "<|vision_start|><|image_pad|><|vision_end|>" in findings[0].seen.replace(" ", "")
    assert "a picture of 6 tokens" in findings[1].seen or "2 pictures of 12 tokens" in findings[1].seen
    assert "tokens; the limit is" in findings[2].seen
