"""The answers of an evaluation, as samples for people to read."""

from policy_trainer.evaluation.evaluator import Evaluation, Transcript
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup


def sampled_groups(evaluation: Evaluation, step: int | None) -> list[SampledGroup]:
    """A group of one completion for each problem that was answered and judged. step: None outside of a run."""
    return [_group(place, item, step) for place, item in enumerate(evaluation.transcripts)]


def _group(place: int, item: Transcript, step: int | None) -> SampledGroup:
    completion = SampledCompletion(item.completion, item.reward, item.parts, None, item.tokens, item.finished)
    return SampledGroup(
        step=step,
        kind="eval",
        batch=None,
        task=item.task or None,
        problem=place,
        prompt=item.prompt,
        answer=item.answer or None,
        completions=(completion,),
    )
