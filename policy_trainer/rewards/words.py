"""Answers in words, which no grammar of formulas reads rightly: it takes each letter for a factor."""

import re

_LETTER = r"[^\W\d_]"
# Of two letters or more, not behind a digit as in `2xy`. A list of formulas has `and` and `or` too.
_WORD = re.compile(rf"(?<!\w)(?!(?:and|or)\b){_LETTER}{{2,}}", re.IGNORECASE)
_PROSE = re.compile(rf"(?:{_LETTER}|[\s.,;:'\"\u2019!?&()])+")
# LaTeX in which words may stand.
_WRAPPING = re.compile(r"\\(?:boxed|text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox|operatorname)(?![a-zA-Z])|\\[()\[\]]|[{}$]")
# Shorter units, such as cm, are known to math-verify, and `3 xy` has none.
_AMOUNT = re.compile(rf"\s*[-+]?[0-9][0-9.,]*\s+(?!(?:and|or)\b){_LETTER}{{3,}}(?:{_LETTER}|[\s.'\u2019])*")


def has_words(text: str) -> bool:
    return _WORD.search(text) is not None


def words_of(text: str) -> str | None:
    r"""`\text{No  solution.}` -> `no solution`; None for what holds other than words. A single letter is no word."""
    bare = _WRAPPING.sub("", text)
    if not _PROSE.fullmatch(bare) or not has_words(bare):
        return None
    return " ".join(bare.split()).strip(" .").casefold()


def is_amount(text: str) -> bool:
    """Whether it is a number and its unit in words: `18 dollars`."""
    return _AMOUNT.fullmatch(text) is not None
