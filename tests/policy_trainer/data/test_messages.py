"""Messages with more than a role and content: tool calls, reasoning, names."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import DataConfig, PromptConfig
from policy_trainer.config.supervised import PairsConfig
from policy_trainer.data.messages import as_text
from policy_trainer.data.problem import Problem, Sample
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.data.tasks.user_rows import row_task
from policy_trainer.rewards.functions import arguments
from policy_trainer.rewards.reward_model import TextClassifier
from policy_trainer.supervised.reward_model.preferences import read_preferences
from policy_trainer.supervised.sft import read_demonstrations
from shared.errors import UserError
from tests.policy_trainer.data.tasks.formats import write, write_parquet
from tests.policy_trainer.supervised.reward_model.models import classifier

TRL = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
USER = {"role": "user", "content": "2*3?", "name": "ann"}
ARGUMENTS = {"a": 2, "unit": "m"}


def calling(arguments: Any, **fields: Any) -> dict[str, Any]:
    call = {"type": "function", "id": "call00001", "function": {"name": "times", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


RESULT = {"role": "tool", "content": "6", "tool_call_id": "call00001", "name": "times"}


def conversation(arguments: Any) -> list[dict[str, Any]]:
    return [USER, calling(arguments, reasoning_content="I multiply."), RESULT, {"role": "user", "content": "Sure?"}]


def read(path: Path) -> Problem:
    (problem,) = row_task("jsonl", DataConfig(path=path, eval_path=path), 0).eval_problems()
    return problem


def spoken(arguments: Any) -> tuple[dict[str, Any], ...]:
    """The conversation as it appears in a problem."""
    return tuple({**each, "content": each["content"] or ""} for each in conversation(arguments))


@pytest.fixture(params=["jsonl", "parquet"])
def problem(request: pytest.FixtureRequest, tmp_path: Path) -> Problem:
    """Tables use None for fields that a message lacks but another has."""
    row = {"messages": conversation(ARGUMENTS), "answer": "6"}
    path = tmp_path / f"rows.{request.param}"
    return read(write(path, row) if request.param == "jsonl" else write_parquet(path, row))


def test_every_field_reaches_template_and_rewards(problem: Problem) -> None:
    expected = conversation(ARGUMENTS)
    expected[1]["content"] = ""
    assert list(problem.messages) == expected
    assert arguments(Sample(problem, "6"))["messages"] == expected
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | tojson }}"
    text, *_ = PromptEncoder(tokenizer, PromptConfig(system_prompt=""))._chat_parts(problem)
    if Version(transformers.__version__) >= Version("5.23"):
        expected[1]["thinking"] = "I multiply."  # transformers adds this name for the reasoning
    assert json.loads(text) == expected


def test_nulls_in_arguments_are_values_but_in_tables(tmp_path: Path) -> None:
    """A table has None for the arguments that another call has."""
    rows = [
        {"messages": [USER, calling(given)], "answer": "6"} for given in ({"a": 1, "b": {"c": None, "d": 1}}, {"a": 1})
    ]
    paths = write(tmp_path / "rows.jsonl", *rows), write_parquet(tmp_path / "rows.parquet", *rows)
    given = [
        [
            problem.messages[1]["tool_calls"][0]["function"]["arguments"]
            for problem in row_task("jsonl", DataConfig(path=path, eval_path=path), 0).eval_problems()
        ]
        for path in paths
    ]
    assert given == [[{"a": 1, "b": {"c": None, "d": 1}}, {"a": 1}], [{"a": 1, "b": {"d": 1}}, {"a": 1}]]


@pytest.mark.parametrize("given", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen2_5", '{"name": "times", "arguments": {"a": 2, "unit": "m"}}'),
        ("qwen3", '{"name": "times", "arguments": {"a": 2, "unit": "m"}}'),
        ("llama3_1", '{"name": "times", "parameters": {"a": 2, "unit": "m"}}'),
        ("glm4moe", "<arg_key>a</arg_key>"),
        ("qwen3_6", "<parameter=a>\n2\n</parameter>"),
        ("gptoss", '{"a": 2, "unit": "m"}'),
    ],
)
def test_arguments_are_objects_or_json(name: str, call: str, given: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (TRL / f"{name}.jinja").read_text()
    text, *_ = PromptEncoder(tokenizer, PromptConfig())._chat_parts(Problem("", spoken(given)))
    assert call in text and "6" in text


def test_a_template_may_want_arguments_as_texts() -> None:
    """DeepSeek V3's template concatenates them."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (TRL / "deepseekv3.jinja").read_text()
    encoder = PromptEncoder(tokenizer, PromptConfig())
    assert json.dumps(ARGUMENTS) in encoder._chat_parts(Problem("", spoken(json.dumps(ARGUMENTS))))[0]
    with pytest.raises(UserError, match=r"the model's chat template does not accept .*can only concatenate str"):
        encoder._chat_parts(Problem("", spoken(ARGUMENTS)))


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "demo"])
def test_a_template_that_leaves_calls_out_is_refused(name: str) -> None:
    """The turn would be empty. R1's template writes calls only if the content is None, which transformers removes."""
    tokenizer = make_tokenizer()
    if name != "demo":
        tokenizer.chat_template = (TRL / f"{name}.jinja").read_text()
    with pytest.raises(UserError, match=r"chat template omits tool_calls \(times\); use one that renders them"):
        PromptEncoder(tokenizer, PromptConfig()).encode(Problem("", spoken(ARGUMENTS)))


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": None}, {"role": "assistant"}, calling({}, tool_calls=[], name="x")]
)
def test_only_a_call_or_reasoning_replaces_a_content(message: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows:1: message 2 of messages has no content: only assistant messages with"):
        read(write(tmp_path / "rows", {"messages": [USER, message], "answer": "6"}))


def test_half_a_surrogate_pair_in_a_field(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows:1: tool_calls of messages has \\ud800"):
        read(write(tmp_path / "rows", {"messages": [USER, calling({"a": "\ud800"})], "answer": "6"}))


def test_problems_that_differ_in_calls_are_different(tmp_path: Path) -> None:
    """Every tenth row is held out, and every copy of it."""
    rows = [{"messages": [USER, calling({"a": k})], "answer": "6"} for k in range(10)]
    task = row_task("jsonl", DataConfig(path=write(tmp_path / "rows", *rows)), 0)
    assert task.training_problems == 9


class TestWhereNoTemplateWritesThem:
    """Fields that would be lost are refused by name."""

    LOST = r"tool_calls, reasoning_content"

    def test_plain_prompts(self) -> None:
        plain = PromptEncoder(make_tokenizer(), PromptConfig(prompt_style="plain"))
        with pytest.raises(UserError, match=r"^data: a message has name, which only a chat template can render"):
            plain.encode(Problem("", (USER,)))

    def test_a_reward_model_without_a_template(self) -> None:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = None
        reward_model = TextClassifier(classifier(), tokenizer, max_length=99)
        with pytest.raises(UserError, match="a message has name, which only a chat template can render"):
            reward_model.encode(Sample(Problem("", (USER,)), "6"))

    def test_the_answers_of_sft_and_of_reward_models(self, tmp_path: Path) -> None:
        last = calling({}, content="x", reasoning_content="I multiply.")
        lost = f"rows:1:.* the last message has {self.LOST}, but only its content is trained on; put the whole turn"
        with pytest.raises(UserError, match=lost):
            read_demonstrations(write(tmp_path / "rows", {"messages": [USER, last]}), "data.path")
        pair = {"chosen": [USER, last], "rejected": [USER, {"role": "assistant", "content": "5"}]}
        with pytest.raises(UserError, match=lost):
            read_preferences(PairsConfig(path=write(tmp_path / "rows", pair)), print)


def test_a_mark_in_front_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text('{"prompt": "2*3?", "answer": "6"}\n', encoding="utf-8-sig")
    assert read(path).prompt == "2*3?"


def test_a_reader_sees_every_part_of_a_conversation() -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "times", "arguments": {"a": "ä"}}}],
    }
    assert as_text([USER]) == "2*3?"
    assert as_text([USER, call, RESULT]).splitlines() == [
        'user: 2*3? name "ann"',
        'assistant: tool_calls [{"function": {"name": "times", "arguments": {"a": "ä"}}}]',
        'tool: 6 tool_call_id "call00001" name "times"',
    ]
