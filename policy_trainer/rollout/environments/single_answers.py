"""Problems that are ready to be sampled, and the sampling of single answers to them, without tools."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder
from policy_trainer.rollout.environments.sessions import Session
from policy_trainer.rollout.sampling.sampler import Sampler, SamplingParams, sample


@dataclass(frozen=True)
class OpenProblem:
    """A problem whose environments have been reset: its messages have what they show, and its tools are known.

    sessions: of the rollouts; empty without an environment. problems: one for each rollout, if `reset` returned
    different texts; `problem` is then the first.
    """

    problem: Problem
    sessions: Sequence[Session] = ()
    problems: Sequence[Problem] = ()

    def encode(self, encoder: PromptEncoder) -> EncodedPrompt:
        """The prompt of the group. Raises the errors of `PromptEncoder.encode`."""
        if not self.problems:
            return encoder.encode(self.problem)
        first, *others = (encoder.encode(problem) for problem in self.problems)
        return first.with_endings_of([first, *others])

    def drop(self) -> None:
        """Gives the sessions back; the problem is not sampled."""
        for session in self.sessions:
            session.release()


# Problems to sample, with their prompts.
Opened = Sequence[tuple[OpenProblem, EncodedPrompt]]
# Called again and again with the number of completions that have ended; may raise.
OnProgress = Callable[[int], None]


def nothing(ended: int) -> None:
    """Reports no progress."""


class SingleAnswers:
    """Takes the place of Rollouts, with its methods, where the model has no tools: a completion is one answer."""

    def open(
        self, problems: Mapping[int, Problem], size: int, on_progress: OnProgress = nothing
    ) -> list[OpenProblem | None]:
        return [OpenProblem(problem) for problem in problems.values()]

    def sample(
        self,
        sampler: Sampler,
        problems: Opened,
        params: SamplingParams,
        seed: int,
        on_progress: OnProgress = nothing,
        *,
        in_step: bool = False,
    ) -> list[list[Completion]]:
        return sample(sampler, [prompt for _, prompt in problems], params, seed, on_progress)

    def release(self) -> None:
        """There is nothing to give back."""
