"""Collects the pages of the documentation's site: the repository's Markdown, what it links to, and an API reference.

python -m tools.site.pages DIRECTORY
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/*.md", "examples/*.md")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)\)")
# What users import, by what they want. Docstrings say the rest.
REFERENCE = {
    "A run": ["policy_trainer.python_api.grpo.GRPO", "policy_trainer.python_api.grpo.GRPOResult"],
    "TRL's interface": ["policy_trainer.trl.trainer.GRPOTrainer", "policy_trainer.trl.config.GRPOConfig"],
    "The server's client": ["shared.client.client.RefServerClient"],
    "Batches": ["shared.batch.TokenGroup", "shared.batch.Batch", "shared.sampling_mask.SamplingMask"],
    "Models and log-probs": [
        "shared.models.load_model",
        "shared.models.load_tokenizer",
        "shared.logprobs.choose_forward",
    ],
    "Sampling": [
        "policy_trainer.rollout.sampling.hf.HFSampler",
        "policy_trainer.rollout.sampling.sampler.SamplingParams",
        "policy_trainer.rollout.sampling.sampler.sample",
    ],
    "The loss": [
        "policy_trainer.algorithms.objective.advantages.advantages",
        "policy_trainer.algorithms.objective.aggregation.token_weights",
        "policy_trainer.algorithms.objective.loss.token_loss",
        "policy_trainer.learner.groups.make_group",
        "policy_trainer.learner.groups.with_old_logps",
    ],
}


def collect(target: Path) -> None:
    """Fills a directory that is made anew, with the repository's paths, so that relative links stay as they are."""
    shutil.rmtree(target, ignore_errors=True)
    for page in (page for pattern in PAGES for page in ROOT.glob(pattern)):
        text = page.read_text()
        for words, link in _LINK.findall(text):
            linked = (page.parent / link).resolve()
            if linked.is_dir():  # a site has no page of it
                text = text.replace(f"[{words}]({link})", words)
            elif linked.is_file() and linked.suffix != ".md":
                shutil.copyfile(linked, _place(linked, target))
        _place(page, target).write_text(text)
    (target / "reference.md").write_text(_reference())


def _place(file: Path, target: Path) -> Path:
    """The file's path below target. Makes its directory."""
    place = target / file.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _reference() -> str:
    parts = ["# Python reference\n\n[python.md](docs/python.md), [client.md](docs/client.md) and "
             "[pieces.md](docs/pieces.md) show how these are used together.\n"]  # fmt: skip
    for title, names in REFERENCE.items():
        parts += [f"## {title}\n", *(f"::: {name}\n" for name in names)]
    return "\n".join(parts)


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
