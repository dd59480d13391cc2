"""The rows of TRL's datasets: their order, streams, and what is wrong with them."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from policy_trainer.trl import GRPOConfig
from policy_trainer.trl.rows import check_environments, rows_of, training_rows
from shared.errors import UserError

ROWS = Dataset.from_list([{"prompt": str(i)} for i in range(10)])


def endless() -> Iterator[dict[str, Any]]:
    yield from ({"prompt": str(i), "answer": None if i < 3 else i} for i in count())


def args(**given: Any) -> GRPOConfig:
    """With two prompts in a generation batch."""
    return GRPOConfig("out", **{"per_device_train_batch_size": 8, "num_generations": 4, **given})


def prompts(dataset: Any, args: GRPOConfig) -> list[str]:
    rows, _ = training_rows(dataset, args, None)
    assert rows is not None
    return list(rows["prompt"])


def test_an_endless_stream_gives_the_rows_that_its_steps_use() -> None:
    stream = IterableDataset.from_generator(endless)
    assert prompts(stream, args(max_steps=3, shuffle_dataset=False)) == ["0", "1", "2", "3", "4", "5"]
    several = args(max_steps=4, steps_per_generation=2, num_iterations=2, shuffle_dataset=False)
    assert prompts(stream, several) == ["0", "1", "2", "3"], "one batch of 16 has four updates"


def test_one_process_reads_a_stream() -> None:
    chosen: Any = args(max_steps=1, dataloader_num_workers=4)
    training_rows(ROWS.to_iterable_dataset(), chosen, None)
    assert chosen.accelerator_config.dispatch_batches is False and chosen.dataloader_num_workers == 0
    chosen.accelerator_config = {"dispatch_batches": True}
    with pytest.raises(UserError, match="Iterable datasets require `dispatch_batches=False`"):
        training_rows(ROWS.to_iterable_dataset(), chosen, None)


def test_a_stream_is_shuffled_as_in_trl() -> None:
    stream = ROWS.to_iterable_dataset()
    expected = [row["prompt"] for row in stream.shuffle(seed=7)][:6]
    assert prompts(stream, args(max_steps=3, seed=7)) == expected != sorted(expected)
    _, shuffle = training_rows(stream, args(max_steps=3), None)
    assert not shuffle, "the rows have TRL's order already"


def test_a_short_stream_gives_all_its_rows() -> None:
    rows, shuffle = training_rows(ROWS.to_iterable_dataset(), args(max_steps=100), None)
    assert rows is not None and sorted(rows["prompt"]) == sorted(ROWS["prompt"]) and shuffle, "in later passes"
    assert list(rows_of(ROWS.to_iterable_dataset(), "eval_dataset")["prompt"]) == list(ROWS["prompt"])


def test_rows_in_order_leave_out_what_fills_no_batch() -> None:
    """As TRL does in each pass."""
    odd = ROWS.select(range(9))
    assert len(prompts(odd, args())) == 9, "others have their turn when shuffled"
    assert prompts(odd, args(shuffle_dataset=False)) == list(ROWS["prompt"])[:8]


@pytest.mark.parametrize(
    ("dataset", "environments", "message"),
    [
        (IterableDataset.from_generator(endless), None, "max_steps: The train_dataset does not implement __len__"),
        (None, None, "train_dataset: `train_dataset` is required unless an `environment_factory` is provided"),
        (None, {"a": dict, "b": dict}, "train_dataset: a dict `environment_factory` requires a `train_dataset`"),
        (None, dict, "max_steps: must be set without a train_dataset"),
        (
            Dataset.from_dict({"prompt": []}),
            None,
            "train_dataset: must be one non-empty datasets.Dataset, got an empty",
        ),
        ([1], None, "train_dataset: must be one non-empty datasets.Dataset, got a list"),
    ],
)
def test_what_holds_no_rows_is_refused(dataset: Any, environments: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        training_rows(dataset, args(), environments)
    assert str(refused.value).startswith(message) and isinstance(refused.value, ValueError)


def test_every_row_names_one_of_several_environments() -> None:
    named = Dataset.from_list([{"environment": "a"}, {"environment": "c"}])
    check_environments(named, {"a": dict, "c": dict})
    check_environments(named, dict)
    for rows in (named, ROWS):
        with pytest.raises(UserError, match=r"train_dataset: environment=.* is not among the environments .*: a, b"):
            check_environments(rows, {"a": dict, "b": dict})
