"""Rewards of published recipes: Simple-GRPO and A. Burkov's Language Models Book (GSM8K), Open-R1 (mathematics), EasyR1
(geometry in pictures), and nano-aha-moment and GRPO:Zero (Countdown).

In both Countdown recipes the prompt ends with `<think>`, so their rewards judge only what was sampled, and the format
rewards put this tag before it.
"""

import math
import re
from collections import deque
from fractions import Fraction

from policy_trainer.data.problem import Sample, Score
from policy_trainer.rewards.answers import MAX_ANSWER_CHARACTERS, each_tag_once, format_reward, matches_whole
from policy_trainer.rewards.expressions import MAX_CHARACTERS, NoExpression, evaluate
from policy_trainer.rewards.mathematics import as_latex, boxed, graded, read_first, read_latex, read_number, same
from shared.errors import UserError
from shared.spelling import spell_setting

# The same matches as `\d+\.\d+|\d+/\d+|\d+`.
_NUMBER = re.compile(r"\d+(?:[./]\d+)?")
_SIMPLE_SEAM = re.compile(r"</think>[\n ]*<answer>")
_BOOK_NUMBER = re.compile(r"-?\d*\.?\d+")
_BOOK_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_R1_START = "<think>\n"
_R1_SEAM = "\n</think>\n<answer>\n"
_R1_END = re.compile(r"\n</answer>$", re.MULTILINE)
_R1_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
# White space that `\s*(<|>|/)\s*` takes away. That pattern would take quadratic time for a long white space.
_EASYR1_SPACE = re.compile(r"(?<!\s)\s+(?=[<>/])|(?<=[<>/])\s+")
_ARITHMETIC = re.compile(r"[\d+\-*/().\s]+")
_INTEGER_ARITHMETIC = re.compile(r"[0-9+\-*/() ]+")
_THINK_TAG = re.compile(r"</?think>")
_AHA_SEAM = "</think>\n<answer>"
_ZERO_SEAM = re.compile(_AHA_SEAM)
_CLOSE_ENOUGH = Fraction(1, 100_000)


def simple_grpo_accuracy(sample: Sample) -> float:
    """+1 if math-verify finds the last number of the completion equal to the gold answer, else -1."""
    expected = read_number(sample.problem.answer)
    if not expected:
        return math.nan
    number = last_number(sample.completion)
    if number is None or len(number) > MAX_ANSWER_CHARACTERS:
        return -1.0
    return 1.0 if same(expected, read_number(number)) else -1.0


def last_number(text: str) -> str | None:
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return numbers[0][0] if numbers else None


def simple_grpo_format(sample: Sample) -> float:
    r"""+1.25 for `^<think>.*?</think>[\n ]*<answer>.*?</answer>$` (DOTALL) and two tags of each kind, else -1."""
    right = matches_whole(sample.completion, _SIMPLE_SEAM) and each_tag_once(sample.completion)
    return 1.25 if right else -1.0


def lm_book_correct(sample: Sample) -> float:
    """2 if the text in the last answer tags is the gold answer; 1.5 if both contain one number, and these are equal;
    else 0."""
    answer, gold = _book_answer(sample.completion), sample.problem.answer.strip()
    if answer == gold:
        return 2.0
    number = _only_number(answer)
    return 1.5 if number is not None and number == _only_number(gold) else 0.0


def lm_book_tags(sample: Sample) -> float:
    """0.2 for each of the four tags that occurs."""
    return 0.2 * sum(tag in sample.completion for tag in _BOOK_TAGS)


def _book_answer(completion: str) -> str | None:
    """The text from the last opening tag to the next closing tag; None for `...`, which the prompt contains."""
    _, opened, rest = completion.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    answer = answer.strip()
    return answer if opened and closed and answer != "..." else None


def _only_number(text: str | None) -> float | None:
    numbers = _BOOK_NUMBER.findall(text or "")
    return float(numbers[0]) if len(numbers) == 1 else None


def open_r1_accuracy(sample: Sample) -> Score:
    """1 if the completion's boxed formula, else one in LaTeX that it calls the answer, equals the problem's solution,
    else 0; None where math-verify reads nothing in the solution.

    The solution is the column `solution`, as in the recipe; else the gold answer, as a formula.
    """
    expected = read_first(str(sample.problem.extras.get("solution") or as_latex(sample.problem.answer)))
    return float(same(expected, read_latex(sample.completion))) if expected else None


def open_r1_format(sample: Sample) -> float:
    r"""1 for `^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$` (DOTALL, MULTILINE), else 0.

    In linear time: only the first seam is tried, since the text after a later one is shorter.
    """
    text = sample.completion
    seam = text.find(_R1_SEAM, len(_R1_START))
    whole = text.startswith(_R1_START) and seam >= 0 and _R1_END.search(text, seam + len(_R1_SEAM))
    return 1.0 if whole else 0.0


def open_r1_tag_count(sample: Sample) -> float:
    """0.25 for each of the four tags, with its line ends, that occurs exactly once."""
    return 0.25 * sum(sample.completion.count(tag) == 1 for tag in _R1_TAGS)


def easyr1_math_accuracy(sample: Sample) -> float:
    """1 if mathruler accepts the text in the last box, or the text `None` without a box; else 0. NaN without a gold
    answer."""
    return graded(boxed(_EASYR1_SPACE.sub("", sample.completion)), sample.problem.answer)


def easyr1_math_format(sample: Sample) -> float:
    r"""1 for `^<think>.*</think>.*\\boxed\{.*\}.*$` (DOTALL), without the white space around < > and /; else 0.

    In linear time: each part is looked for after the first place of the part before it.
    """
    text = _EASYR1_SPACE.sub("", sample.completion)
    _, _, rest = text.removeprefix("<think>").partition("</think>")
    _, _, box = rest.partition(r"\boxed{")
    return float(text.startswith("<think>") and "}" in box)


def easyr1_r1v_accuracy(sample: Sample) -> float:
    """1 if mathruler accepts the first answer whose tags are in one line, or the whole text without one; else 0. NaN
    without a gold answer."""
    answer = _first_answer_of_a_line(sample.completion)
    return graded((sample.completion if answer is None else answer).strip(), sample.problem.answer.strip())


def easyr1_r1v_format(sample: Sample) -> float:
    r"""1 if the whole text is `<think>.*?</think>\s*<answer>.*?</answer>` (DOTALL), else 0."""
    return format_reward(sample) if sample.completion.endswith("</answer>") else 0.0  # no line end after it


def nano_aha_format(sample: Sample) -> float:
    """1 for a think block, a line end and an answer block; 0.5 if the answer is not arithmetic; else 0."""
    text = "<think>" + sample.sampled.removesuffix("\n")
    tag = _THINK_TAG.search(text, len("<think>"))  # one block: the next think tag closes it
    start = tag.start() + len(_AHA_SEAM) if tag else 0
    if not tag or not text.startswith(_AHA_SEAM, tag.start()) or not text.endswith("</answer>", start):
        return 0.0
    answer = text[start : -len("</answer>")].strip()
    return 1.0 if _ARITHMETIC.fullmatch(answer) else 0.5


def nano_aha_equation(sample: Sample) -> float:
    """1 if the first answer whose tags are in one line uses each number once and reaches the target, else 0."""
    return _reaches((_first_answer_of_a_line(sample.sampled) or "").strip(), sample)


def grpo_zero_format(sample: Sample) -> float:
    r"""1 for `^<think>.*?</think>\n<answer>.*?</answer>$` (DOTALL); else 0.1 for a think block plus 0.5 for an answer
    block."""
    text = "<think>" + sample.sampled
    if matches_whole(text, _ZERO_SEAM):
        return 1.0
    return 0.1 * ("</think>" in text) + 0.5 * (_first_answer(text) is not None)


def grpo_zero_equation(sample: Sample) -> float:
    """1 if the first answer, of whole numbers, operators and spaces only, uses each number once and reaches the target;
    else 0."""
    answer = (_first_answer(sample.sampled) or "").removesuffix("\n")  # `$` also matches before a final line end
    return _reaches(answer if _INTEGER_ARITHMETIC.fullmatch(answer) else "", sample)


def _first_answer(text: str) -> str | None:
    """The first match of `<answer>(.*?)</answer>` (DOTALL). If the first opening tag is not closed, no later one is."""
    _, _, rest = text.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return answer if closed else None


def _first_answer_of_a_line(text: str) -> str | None:
    """The first match of `<answer>(.*?)</answer>`, whose `.` matches no line end."""
    answers = map(_first_answer, text.split("\n"))
    return next((answer for answer in answers if answer is not None), None)


def _reaches(expression: str, sample: Sample) -> float:
    """1 if the expression uses the problem's numbers once each and reaches its target, else 0; NaN if the problem's own
    numbers cannot be read."""
    extras = sample.problem.extras
    missing = [name for name in ("numbers", "target") if name not in extras]
    if missing:
        raise UserError(
            f"rewards: countdown rewards need problems with {' and '.join(missing)}, as in task countdown",
            f"choose other {spell_setting('rewards')}",
        )
    try:
        numbers, target = sorted(map(int, extras["numbers"])), Fraction(str(extras["target"]))
    except (TypeError, ValueError, ZeroDivisionError):
        return math.nan
    if len(expression) > MAX_CHARACTERS or sorted(map(int, re.findall(r"\d+", expression))) != numbers:
        return 0.0
    try:
        return float(abs(evaluate(expression) - target) < _CLOSE_ENOUGH)
    except NoExpression:
        return 0.0
