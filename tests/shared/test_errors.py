"""Errors as text."""

from shared.errors import brief


def test_an_error_inside_another_is_short() -> None:
    assert brief(TypeError("a bug")) == "TypeError: a bug"
    long = brief(NotImplementedError("no kernel\n\n" + "backend " * 500))
    assert long.startswith("NotImplementedError: no kernel backend") and len(long) < 230 and long.endswith(" …")
