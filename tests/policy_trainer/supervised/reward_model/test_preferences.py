"""Rows as pairs: every form of TRL's, the text that is scored, what is left out, and which rows are refused."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import RewardTrainingConfig
from policy_trainer.config.supervised import PairsConfig
from policy_trainer.rewards.reward_model import TextClassifier
from policy_trainer.supervised.reward_model.preferences import Pair, load_pairs, read_preferences
from policy_trainer.supervised.training import RowSet
from shared.errors import UserError
from shared.settings import from_values
from tests.docs.pages import texts as texts_of
from tests.policy_trainer.supervised.reward_model.models import classifier

requested = {"role": "user", "content": "1+2=?"}
RIGHT, WRONG = {"role": "assistant", "content": "3"}, {"role": "assistant", "content": "4"}
PAIR = {"prompt": [requested], "chosen": [RIGHT], "rejected": [WRONG]}
CHAT = ("<|user|>1+2=?<|end|><|assistant|>3<|end|>", "<|user|>1+2=?<|end|><|assistant|>4<|end|>")
FORMS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "explicit texts": ({"prompt": "1+2=?", "chosen": "3", "rejected": "4"}, CHAT),
    "explicit messages": (PAIR, CHAT),
    "messages and texts": ({"prompt": [requested], "chosen": "3", "rejected": "4"}, CHAT),
    "a text and messages": ({"prompt": "1+2=?", "chosen": [RIGHT], "rejected": [WRONG]}, CHAT),
    "conversations": ({"chosen": [requested, RIGHT], "rejected": [requested, WRONG]}, CHAT),
    "conversations next to their prompt": (
        {"prompt": "1+2=?", "chosen": [requested, RIGHT], "rejected": [requested, WRONG]}, CHAT,
    ),
    "a column without a value": ({"prompt": None, "chosen": [requested, RIGHT], "rejected": [requested, WRONG]}, CHAT),
    "a text that has been through the template": (
        {"prompt": "<|user|>1+2=?<|end|><|assistant|>", "chosen": "3<|end|>", "rejected": "4<|end|>"}, CHAT,
    ),
    "whole texts": ({"chosen": "1+2=3", "rejected": "1+2=4"}, ("1+2=3", "1+2=4")),
}  # fmt: skip

Load = Callable[..., RowSet[Pair]]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any, name: str = "pairs.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerFast, write: Callable[..., Path]) -> Load:
    """All rows are training rows; another one is held out."""

    def load(
        *rows: Any,
        note: Callable[[str], None] = print,
        too_long: str = "truncate",
        tokenizer: Any = tokenizer,
        **changes: Any,
    ) -> Any:
        data = {"path": write(*rows), "eval_path": write(PAIR, name="eval.jsonl"), "too_long": too_long}
        config = from_values(RewardTrainingConfig, model="none", data=data, **changes)
        return load_pairs(config, TextClassifier(classifier(), tokenizer, max_length=config.max_length), note)

    return load


def texts(pair: Pair, tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    return tuple(str(tokenizer.decode(ids.tolist())) for ids in (pair.chosen, pair.rejected))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_scored_as_a_reward_model_scores_it(
    load: Load, tokenizer: PreTrainedTokenizerFast, form: str
) -> None:
    row, expected = FORMS[form]
    (pair,) = load(row).rows
    assert texts(pair, tokenizer) == expected


@pytest.mark.parametrize("form", ["explicit messages", "whole texts"])
def test_a_dataset(tmp_path: Path, form: str) -> None:
    from datasets import Dataset, DatasetDict

    row, _ = FORMS[form]
    splits: Any = {"train": Dataset.from_list([row] * 3), "test": Dataset.from_list([row] * 2)}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    data = {"dataset": str(tmp_path / "saved"), "eval_split": "test"}
    train, held_back = read_preferences(from_values(RewardTrainingConfig, model="none", data=data).data, print)
    assert (len(train), len(held_back)) == (3, 2)
    assert [item.chosen.completion[-1] + item.rejected.completion[-1] for item in train] == ["34"] * 3


@pytest.mark.parametrize("form", ["whole texts", "conversations"])
def test_every_tenth_is_held_out_with_all_of_its_prompt(write: Callable[..., Path], form: str) -> None:
    def row(i: int) -> dict[str, Any]:
        question = {"role": "user", "content": str(i % 25)}
        whole = {name: [question, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
        return {"chosen": f"{i % 25}", "rejected": "no"} if form == "whole texts" else whole

    config = from_values(RewardTrainingConfig, model="none", data={"path": write(*(row(i) for i in range(50)))})
    train, held_back = read_preferences(config.data, print)
    assert len(held_back) == 5 and len(train) == 40
    assert not {item.prompt for item in train} & {item.prompt for item in held_back}


class TestLeftOut:
    def test_pairs_that_teach_nothing_are_counted(self, load: Load) -> None:
        notes: list[str] = []
        empty, same = {**PAIR, "rejected": ""}, {**PAIR, "rejected": [RIGHT]}
        assert len(load(PAIR, empty, {**PAIR, "chosen": ""}, same, note=notes.append).rows) == 1
        assert notes == [
            f"pairs: 1 to train on, of {notes[0].split('of ')[1].split(' ')[0]} tokens; 1 held out; "
            "2 left out, of which an answer is empty; 1 left out, whose texts are equal"
        ]

    def test_nothing_is_left(self, load: Load) -> None:
        with pytest.raises(UserError, match=r"data: no pair is left; 1 left out, whose texts are equal; add pairs"):
            load({**PAIR, "rejected": [RIGHT]})


class TestTooLong:
    LONG = {"prompt": [requested], "chosen": "9" * 90 + "3", "rejected": "4"}  # noqa: RUF012

    def test_keeps_its_end(self, load: Load, tokenizer: PreTrainedTokenizerFast) -> None:
        notes: list[str] = []
        (pair,) = load(self.LONG, note=notes.append, max_length=40).rows
        assert texts(pair, tokenizer) == ("9" * 38 + "3<|end|>", CHAT[1])
        assert "1 cut to their last 40 tokens" in notes[0]

    def test_is_dropped(self, load: Load) -> None:
        notes: list[str] = []
        assert len(load(self.LONG, PAIR, note=notes.append, max_length=40, too_long="drop").rows) == 1
        assert "1 dropped, with more than 40 tokens" in notes[0]

    def test_is_refused(self, load: Load) -> None:
        with pytest.raises(
            UserError, match=r"pairs\.jsonl:2: has a text of \d+ tokens, and it may have 40: max_length"
        ):
            load(PAIR, self.LONG, max_length=40, too_long="refuse")

    def test_for_telling_them_apart(self, load: Load) -> None:
        """Once they are cut they are equal."""
        rejected = self.LONG["chosen"].replace("9", "8", 1)
        notes: list[str] = []
        load({**self.LONG, "rejected": rejected}, PAIR, note=notes.append, max_length=40)
        assert "1 left out, whose texts are equal" in notes[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a"}, "data.path: .*pairs.jsonl has no column rejected; its columns: chosen"),
        ({**PAIR, "rejected": 3}, "pairs.jsonl:1: rejected must be a text or a list of messages"),
        ({**PAIR, "chosen": None}, "pairs.jsonl:1: chosen must be a text or a list of messages"),
        ({**PAIR, "chosen": []}, "pairs.jsonl:1: chosen must be a non-empty list"),
        ({**PAIR, "chosen": [requested]}, "pairs.jsonl:1: chosen must end with an assistant message"),
        ({"chosen": [RIGHT], "rejected": [WRONG]}, "pairs.jsonl:1: chosen must end with .* that follows others"),
        ({**PAIR, "prompt": ""}, "prompt must be a list|prompt must be a text"),
        ({**PAIR, "chosen": [{"user": "x"}]}, 'chosen must be a list of messages: {"role"'),
        ({**PAIR, "margin": "1"}, "pairs.jsonl:1: margin must be a finite number, got '1'; leave it out for 0"),
        ({**PAIR, "margin": True}, "margin must be a finite number"),
        ({**PAIR, "margin": float("nan")}, "margin must be a finite number, got nan"),
    ],
)
def test_malformed_pairs_are_refused(load: Load, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(row)


def test_a_token_that_the_model_has_no_row_for(load: Load, tokenizer: PreTrainedTokenizerFast) -> None:
    longer = deepcopy(tokenizer)
    longer.add_tokens(["<new>"])
    with pytest.raises(UserError, match=r"pairs\.jsonl:2: .*the token <new> has id \d+, but the model's embedding"):
        load(PAIR, {"prompt": "1", "chosen": "<new>", "rejected": "2"}, tokenizer=longer)


def test_the_examples_of_the_page(write: Callable[..., Path]) -> None:
    path = write(*map(json.loads, texts_of("reward-models.md", "json")[0].splitlines()))
    pairs, _ = read_preferences(PairsConfig(path=path, eval_path=path), print)
    assert [pair.chosen.completion for pair in pairs] == ["2+3=5", "5", "5", "2+3=5"]
    assert [pair.margin for pair in pairs] == [0, 0, 0, 0.5]
