"""Where steps end among the tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.data.problem import Problem
from policy_trainer.data.steps import Step, step_rewards
from policy_trainer.data.tasks.arithmetic import Arithmetic
from shared.errors import UserError

TOKENIZER = make_tokenizer()


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def ids_of(text: str) -> np.ndarray:
    return np.array([*TOKENIZER.encode(text), TOKENIZER.eos_token_id])


# Not the mark of what cannot be decoded: at the end it is taken for one.
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_a_step_ends_at_the_token_that_brings_its_last_character(text: str, ends: list[int]) -> None:
    ids = ids_of(text)
    steps = [Step(end, 1.0) for end in sorted(ends)]
    rewards = step_rewards([steps], [ids], decode)
    # In bytes, of which a token's name here has as many characters; the end token brings none.
    reached = np.cumsum([len(token) for token in TOKENIZER.convert_ids_to_tokens(ids[:-1].tolist())])
    places = [
        int(np.searchsorted(reached, len(text[:end].encode()))) if end <= len(text) else len(ids) - 1
        for end in sorted(ends)
    ]
    assert rewards.ends.tolist() == sorted(set(places))
    assert rewards.rewards.tolist() == [places.count(place) for place in sorted(set(places))]
    assert rewards.counts.tolist() == [len(set(places))]


def test_a_character_of_several_tokens_is_there_with_the_last_of_them() -> None:
    """Llama's tokenizer falls back to bytes, and decodes each byte of an incomplete character to a mark."""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokens = [f"<0x{byte:02X}>" if byte > 127 else chr(byte) for byte in "🙂ab🙂ab".encode()]

    def text(ids: list[int]) -> str:
        return decoder.decode([tokens[i] for i in ids])

    steps = [Step(end, 1.0) for end in (1, 3, 4, 6)]
    assert step_rewards([steps], [np.arange(len(tokens))], text).ends.tolist() == [3, 5, 9, 11]


def test_steps_count_from_the_start_of_the_answer_in_the_prompt() -> None:
    """A step that ends in the prompt ends at the first token."""
    ids = ids_of("abc")
    steps = [Step(end, 1.0) for end in (3, 8, 10)]
    rewards = step_rewards([steps], [ids], decode, start="<think>")
    assert rewards.ends.tolist() == [0, 2] and rewards.rewards.tolist() == [2, 1]


def test_rows_of_a_group_stay_apart() -> None:
    rows = [[Step(1, 0.5), Step(3, -1.0)], [], [Step(2, 2.0)]]
    rewards = step_rewards(rows, [ids_of("abc"), ids_of("x"), ids_of("yz")], decode)
    assert rewards.counts.tolist() == [2, 0, 1]
    assert rewards.ends.tolist() == [0, 2, 1]
    assert rewards.rewards.tolist() == [0.5, -1.0, 2.0]
    assert rewards.rewards.dtype == np.float32


PROBLEM = Problem(answer="112", messages=({"role": "user", "content": "54+58=?"},))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>4+8=12,5+5+1=11</think><answer>112</answer>", [(14, 1.0), (23, 1.0), (50, 1.0)]),
        ("<think>4+8=12,5+5=10</think><answer>102</answer>", [(14, 1.0), (21, 0.0), (48, 0.0)]),
        ("<think>5+5+1=11,4+8=12</think><answer>112</answer>", [(16, 0.0), (23, 0.0), (50, 1.0)]),  # in its place only
        ("<think>4+8=12,5+5+1=11,4+8=12</think>", [(14, 1.0), (23, 1.0), (30, 0.0), (37, 0.0)]),
        ("<think></think><answer>112</answer>", [(8, 0.0), (35, 1.0)]),
        ("4+8=12</think><answer>112</answer>", [(34, 1.0)]),
        ("4+8=12", [(6, 0.0)]),
        ("", [(0, 0.0)]),
    ],
)
def test_steps_of_column_addition(completion: str, expected: list[tuple[int, float]]) -> None:
    assert [(step.end, step.reward) for step in Arithmetic(0).steps(PROBLEM, completion)] == expected


def test_a_text_of_commas_has_few_steps() -> None:
    assert len(Arithmetic(0).steps(PROBLEM, f"<think>{',' * 1_000_000}</think>")) < 20


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step(3, 1.0), Step(2, 0.0)], r"order of their ends, got \[3, 2\]"),
        ([Step(1, 3e38)], r"\[-1e\+06, 1e\+06\]"),
    ],
)
def test_what_no_batch_holds_is_refused(steps: list[Step], message: str) -> None:
    with pytest.raises(UserError, match=f"task: .*{message}"):
        step_rewards([steps], [ids_of("abc")], decode)
