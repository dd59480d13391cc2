"""Dotted names of settings, also inside of lists of groups."""

from pydantic import BaseModel

from shared.settings.names import unknown_names, without


class Source(BaseModel):
    weight: float = 1


class Data(BaseModel):
    path: str = ""
    mixture: list[Source] = []


class Config(BaseModel):
    model: str = ""
    data: Data | None = None


def test_unknown_names_say_where_they_are() -> None:
    values = {"model": 1, "mdl": 2, "data": {"pth": 3, "mixture": [{"weight": 1}, {"wieght": 2}]}}
    assert list(unknown_names(values, Config)) == ["mdl", "data.pth", "data.mixture.1.wieght"]
    assert list(unknown_names({"data": 3, "model": {"a": 1}}, Config)) == [], "wrong types are another's to refuse"


def test_without_a_name() -> None:
    values = {"a": 1, "b": {"c": 2, "d": [{"e": 3}]}}
    assert without(values, "a") == {"b": values["b"]}
    assert without(values, "b.c") == {"a": 1, "b": {"d": [{"e": 3}]}}
    assert without(values, "b.d.0.e") == {"a": 1, "b": {"c": 2}}
