"""Converts TRL's datasets to rows, and checks the environments that the rows name."""

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

from policy_trainer.python_api.dataset_rows import as_read, remedy
from policy_trainer.trl.config import GRPOConfig
from policy_trainer.trl.steps import updates_of
from shared.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset


def training_rows(dataset: Any, args: GRPOConfig, environments: Any) -> "tuple[Dataset | None, bool]":
    """Returns the training rows, or None if an environment provides the problems; and whether to reshuffle the rows in
    each epoch. From a streaming dataset it takes as many rows as max_steps can use, in TRL's order.

    Raises UserError, in TRL's words, if the dataset is missing or is not a dataset.
    """
    if dataset is None:
        _check_environment(args, environments)
        return None, False
    prompts = args.generation_batch_size // args.num_generations
    if not is_stream(dataset):
        rows = rows_of(dataset, "train_dataset")
        # Without shuffling, TRL drops the last rows of each epoch if they do not fill a batch.
        whole = len(rows) - len(rows) % prompts
        return rows if args.shuffle_dataset or not whole else rows.select(range(whole)), args.shuffle_dataset
    _read_by_one_process(args)
    if args.max_steps <= 0:
        raise UserError(
            "max_steps: The train_dataset does not implement __len__, max_steps has to be specified: it is a stream"
        )
    needed = ceil(args.max_steps / updates_of(args, 1)) * prompts
    shuffled = dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
    rows = rows_of(shuffled.take(needed), "train_dataset")
    return rows, args.shuffle_dataset and len(rows) < needed


def _read_by_one_process(args: GRPOConfig) -> None:
    """Sets the fields that TRL sets for a streaming dataset. Raises UserError if dispatch_batches is True."""
    from transformers.trainer_pt_utils import AcceleratorConfig  # slow to import

    given: Any = args.accelerator_config
    config = AcceleratorConfig(**given) if isinstance(given, Mapping) else given or AcceleratorConfig()
    if config.dispatch_batches:
        raise UserError(
            "accelerator_config: Iterable datasets require `dispatch_batches=False`, but it is True", "leave it out"
        )
    config.dispatch_batches = False
    args.accelerator_config, args.dataloader_num_workers = config, 0


def rows_of(dataset: Any, name: str) -> "Dataset":
    """Returns a Dataset whose rows are what iteration over the dataset returns. A stream is read to its end.

    Raises UserError if the dataset is empty or is not a dataset.
    """
    from datasets import Dataset  # slow to import; a script that has a Dataset has imported it already

    if is_stream(dataset):
        dataset = Dataset.from_list(list(dataset), features=dataset.features)
    if isinstance(dataset, Dataset) and len(dataset):
        return as_read(dataset, name)
    empty = "an empty" if isinstance(dataset, Dataset) else "a"
    raise UserError(
        f"{name}: must be one non-empty datasets.Dataset, got {empty} {type(dataset).__name__}; {remedy(dataset)}"
    )


def held_out_rows(dataset: Any) -> "tuple[Dataset, dict[str, int]]":
    """Returns the rows of a dataset, or of all datasets in a dict, and the number of rows of each by the prefix of its
    metrics.

    A column that only some datasets have is None in the rows of the others. Raises UserError as `rows_of` does, and if
    the columns of the datasets have different types.
    """
    from datasets import concatenate_datasets  # slow to import

    if not isinstance(dataset, Mapping):
        rows = rows_of(dataset, "eval_dataset")
        return rows, {"eval": len(rows)}
    several = {name: rows_of(each, f"eval_dataset[{name!r}]") for name, each in dataset.items()}
    if not several:
        raise UserError("eval_dataset: has no dataset")
    try:
        rows = concatenate_datasets([*several.values()])
    except ValueError as error:
        raise UserError(
            "eval_dataset: with eval_strategy its datasets are evaluated together, so their columns need the same "
            f"types; or pass them to evaluate(): {error}"
        ) from None
    return rows, {f"eval_{name}": len(each) for name, each in several.items()}


def is_stream(dataset: Any) -> bool:
    from datasets import IterableDataset  # slow to import

    return isinstance(dataset, IterableDataset)


def check_environments(rows: "Dataset | None", environments: Any) -> None:
    """Raises UserError if a row names an environment that is not in the dict of environments."""
    if rows is None or not isinstance(environments, Mapping):
        return
    names = rows.unique("environment") if "environment" in rows.column_names else [None]
    if unknown := [name for name in names if name not in environments]:
        raise UserError(
            f"train_dataset: environment={unknown[0]!r} of a row is not among the environments passed to "
            f"environment_factory: {', '.join(environments)}"
        )


def _check_environment(args: GRPOConfig, environments: Any) -> None:
    if not environments:
        raise UserError("train_dataset: `train_dataset` is required unless an `environment_factory` is provided")
    if isinstance(environments, Mapping):
        raise UserError(
            "train_dataset: a dict `environment_factory` requires a `train_dataset`, whose column `environment` "
            "names that of each row; without a dataset, pass a single environment"
        )
    if args.max_steps <= 0:
        raise UserError("max_steps: must be set without a train_dataset: an environment has problems without end")
