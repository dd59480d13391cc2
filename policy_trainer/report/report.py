"""A run as one HTML file."""

from pathlib import Path

from policy_trainer.report.curves import curves_of
from policy_trainer.report.ledger import limit_of, parts_of
from policy_trainer.report.page import write_page
from policy_trainer.report.recorded import read_run
from policy_trainer.report.story import story
from policy_trainer.report.texts import held_out_chapters, training_chapters


def write_report(root: Path, output: Path) -> None:
    """Raises UserError for a directory that holds no run, and for a file that cannot be written."""
    run = read_run(root)
    parts = parts_of(run)
    write_page(
        output,
        "report.html",
        title=run.name,
        run=run,
        sentences=story(run),
        pictures=curves_of(run),
        parts=parts,
        limit=limit_of(parts),
        training=training_chapters(run.groups),
        held_out=held_out_chapters(run.groups),
    )
