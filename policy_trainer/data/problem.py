"""Tasks and rewards: a task has training problems by index, held-out problems, and a judge of answers; a reward scores
the sample of a completion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# role and content, a text; and what else the row has: tool_calls, name, reasoning_content.
Message = Mapping[str, Any]
# JSON schemas of functions, as transformers makes them and chat templates take them.
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Problem:
    """One prompt, with its pictures if it has any, and its gold answer.

    messages go through the model's chat template; prompt is used as it is. With both, the prompt is a text: its message
    is used where the model has a chat template, else the text.
    """

    # Empty if there is none.
    answer: str
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    # Encoded image files. Each stands where messages have `<image>`; see data/pictures.py.
    images: tuple[bytes, ...] = field(default=(), repr=False)
    # What rewards may need besides the gold answer: the numbers of a countdown problem, the columns of a user's row.
    extras: Mapping[str, Any] = field(default_factory=dict)
    # The task's; the settings of the same names under data.* replace them.
    system_prompt: str = ""
    assistant_prefill: str = ""
    # The task of a mixture that the problem came from.
    task: str = ""
    # Variables of the chat template, which override those of the settings.
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Those that the model may call; added before the prompt is encoded.
    tools: Tools = ()
    # The text that `reset` of its environment returned: the end of the last message. Nothing in it is a control token.
    shown: str = ""
    # The location of its row, for error messages: two rows may hold the same problem.
    where: str = field(default="", compare=False, repr=False)


# (problem, completion) -> 1 if the completion answers the problem correctly, else 0; NaN if the gold answer cannot be
# judged.
Correct = Callable[[Problem, str], float]


class Task(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def correct(self) -> Correct:
        """The meaning of accuracy in this task, for rewards and evaluations."""
        ...

    @property
    def default_rewards(self) -> tuple[str, ...]:
        """Names of the rewards that are used when the configuration names none."""
        ...

    def problem(self, index: int) -> Problem:
        """The training problem at this index: a pure function of the task's seed and the index."""
        ...

    def eval_problems(self) -> Sequence[Problem]:
        """The problems for evaluation. `problem` never returns one of them."""
        ...


def training_problems(task: Task) -> int | None:
    """How many problems a pass over the task has; None if its training problems never repeat."""
    return getattr(task, "training_problems", None)


@dataclass(frozen=True)
class EnvironmentReference:
    """Where rewards reach the environment of a rollout, on the worker's machine.

    relay: path of the worker's Unix socket. session: the rollout's number there. key: of an instance that lives in the
    process that began the run, empty for others.
    """

    relay: str
    session: int
    key: str = ""


@dataclass(frozen=True)
class Sample:
    """One completion of a problem. completion: the whole answer as text, without special tokens.

    tokens: number of sampled tokens, with the EOS. finished: False if it was cut off at the length limit. start: the
    beginning of the answer that stood in the prompt, such as a prefill; `completion` begins with it. ids: the sampled
    tokens. messages, environment: of a rollout of several turns; its messages are the assistant's and the tools'.
    environment_reward: what the environment's get_reward returned; None if it has none, NaN if it failed.
    environment_lost: whether the environment's process has ended.
    """

    problem: Problem
    completion: str
    tokens: int = 0
    finished: bool = True
    start: str = ""
    ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    environment: EnvironmentReference | None = None
    environment_reward: float | None = None
    environment_lost: bool = False

    @property
    def sampled(self) -> str:
        """The part of the answer that the model wrote."""
        return self.completion.removeprefix(self.start)


# A failure caused by the completion gets the failing score. NaN means only that the gold answer cannot be judged. None
# leaves the reward out of the completion's total: it does not apply to this problem.
Score = float | None
Reward = Callable[[Sample], Score]
