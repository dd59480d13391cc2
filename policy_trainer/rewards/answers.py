"""Answers in tags, and how they are compared with the gold answer: as text or as numbers."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from policy_trainer.data.problem import Correct, Problem, Sample
from policy_trainer.rewards.mathematics import agree, equal_math, read_gold, read_solution

Comparison = Callable[[str, str], float]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Longer answers are wrong: no gold answer has this many characters, and parsing must stay quick.
MAX_ANSWER_CHARACTERS = 1000
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# A box, with its brace or with a single symbol or number, of which MATH has a few; or a brace, or a backslash and the
# brace or backslash that it takes for text.
_BOX = re.compile(r"(\\(?:boxed|fbox)(?![a-zA-Z])\s*)(?:(\{)|([^\s$.,{}]+))|\\(?!\\(?:boxed|fbox))[\\{}]|[{}]")
_AMOUNT = r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
# A sign after a digit or a bracket is an operator.
_IN_TEXT = re.compile(rf"(?:(?<![0-9)\]])([+-]))?\$?{_AMOUNT}")
# At most 100 digits in a row: more are no number of a problem.
_NUMBER = re.compile(rf"(?!.*[0-9]{{101}})\$?([+-]?)\$?{_AMOUNT}")


def parse_answer(completion: str) -> str | None:
    """The text in the last answer tags, or None. A completion without tags has no answer."""
    # Cut after the last closing tag: the pattern would search from each unclosed tag to the end, in quadratic time.
    closed, tag, _ = completion.rpartition("</answer>")
    answers = _ANSWER.findall(closed + tag)
    return answers[-1].strip() if answers else None


def last_boxed(completion: str) -> str | None:
    r"""The text in the last `\boxed{…}` or `\fbox{…}` that is closed, whose braces may be nested; None without one."""
    last, start = None, -1
    opened: list[int | None] = []  # where the text of each open box begins; None for a brace of another kind
    for token in _BOX.finditer(completion):
        if token[3]:
            last, start = token[3], token.start(3)
        elif token[2] or token[0] == "{":
            opened.append(token.end() if token[2] else None)
        elif token[0] == "}" and opened and (begin := opened.pop()) is not None and begin > start:
            last, start = completion[begin : token.start()], begin
    return None if last is None else last.strip()


def last_number(completion: str) -> str | None:
    """The last number, with its sign, thousands separators and decimals, without a dollar sign; None without one."""
    numbers = _IN_TEXT.findall(_plain_text(completion))
    return "".join(numbers[-1]) if numbers else None


# Where an answer is looked for: what `data.answer_in` may name.
PLACES: Mapping[str, Callable[[str], str | None]] = {
    "tags": parse_answer,
    "boxed": last_boxed,
    "last_number": last_number,
    "text": str.strip,
}


def accuracy(compare: Comparison, find: Callable[[str], str | None] = parse_answer) -> Comparison:
    """(completion, gold) -> 1 for a correct answer, else 0. find: the answer in a completion, by default in tags."""

    def judge(completion: str, gold: str) -> float:
        answer = find(completion)
        if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
            answer = ""  # still compared, so that an unparsable gold answer gives NaN
        return compare(answer, gold)

    return judge


def equal_text(answer: str, gold: str) -> float:
    """1.0 if the texts are equal, apart from surrounding white space, else 0.0."""
    return float(answer.strip() == gold.strip())


def equal_number(answer: str, gold: str) -> float:
    """1.0 if the answer is one number, equal to the gold answer, else 0.0; NaN if the gold answer is not a number."""
    expected = _parse_number(gold)
    if expected is None:
        return math.nan
    return float(_parse_number(answer) == expected)


def _parse_number(text: str) -> Decimal | None:
    number = _NUMBER.fullmatch(_plain_text(text).strip().removesuffix("."))
    # Decimal, not float: long numbers would be rounded to their neighbours, and the longest ones to infinity.
    return Decimal(number[1] + number[2].replace(",", "")) if number else None


def _plain_text(text: str) -> str:
    """Replaces what LaTeX and typesetters write in numbers, such as `1{,}000`, by plain characters."""
    return text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace(r"\$", "$")


_SPACE = re.compile(r"</think>\s*<answer>")


def format_reward(sample: Sample) -> float:
    r"""1 for `^<think>.*?</think>\s*<answer>.*?</answer>$` (DOTALL), else 0."""
    return float(matches_whole(sample.completion, _SPACE))


def tags_reward(sample: Sample) -> float:
    """1 for a think and an answer block with each of the four tags exactly once, else 0.

    Closing tags count too: a policy learns to exploit a reward for opening tags within twenty steps.
    """
    return format_reward(sample) if each_tag_once(sample.completion) else 0.0


def matches_whole(completion: str, seam: re.Pattern[str]) -> bool:
    """Whether `^<think>.*?SEAM.*?</answer>$` (DOTALL) matches, in linear time.

    seam: matches from `</think>` to `<answer>`. Only the first seam is tried: if the text after it does not end with
    `</answer>`, neither does the shorter text after a later one.
    """
    text = completion.removesuffix("\n")  # `$` also matches before a final line end
    match = seam.search(text, len("<think>"))
    return text.startswith("<think>") and match is not None and text.endswith("</answer>", match.end())


def each_tag_once(completion: str) -> bool:
    return all(completion.count(tag) == 1 for tag in TAGS)


@dataclass(frozen=True)
class ByAnswer:
    """A completion is correct if the answer in it equals the gold answer; NaN for a problem without one. find: the
    answer in a completion, by default in tags."""

    compare: Comparison
    find: Callable[[str], str | None] = parse_answer

    def __call__(self, problem: Problem, completion: str) -> float:
        return accuracy(self.compare, self.find)(completion, problem.answer) if problem.answer else math.nan


@dataclass(frozen=True)
class ByTask:
    """Judges by the task of the mixture that the problem came from. tasks: by label."""

    tasks: Mapping[str, Correct]

    def __call__(self, problem: Problem, completion: str) -> float:
        return self.tasks[problem.task](problem, completion)


def task_accuracy(correct: Correct, sample: Sample) -> float:
    """The reward `accuracy`: the task's judgement."""
    return correct(sample.problem, sample.completion)


def math_accuracy(sample: Sample) -> float:
    """1 if the completion has the gold answer: boxed, else in LaTeX and called the answer, else as a bare number; NaN
    without a gold answer."""
    expected = read_gold(sample.problem.answer)
    return float(agree(expected, read_solution(sample.completion))) if expected else math.nan


def needs_sandbox(correct: Correct) -> bool:
    """Whether the judgement uses math-verify, which may hang and must run in the sandbox."""
    if isinstance(correct, ByTask):
        return any(needs_sandbox(part) for part in correct.tasks.values())
    return isinstance(correct, ByAnswer) and correct.compare is equal_math


def reads_tags(correct: Correct) -> bool:
    """Whether the judgement reads the answer from <answer> tags."""
    if isinstance(correct, ByTask):
        return any(reads_tags(part) for part in correct.tasks.values())
    return isinstance(correct, ByAnswer) and correct.find is parse_answer
