"""The end of a run."""

from shared.api.base import Answer, Lineage, Request, example


class FinishBody(Request):
    model_config = example(lineage="5f0c2d9e")

    lineage: Lineage | None = None
    """Which training of that name has finished. Absent: that of clients which name none."""


class Finished(Answer):
    expired: int
    """Batches that waited and are expired now."""
