"""How deep an input got: in which function it was refused."""

from collections.abc import Mapping


def refused_in(error: BaseException, stages: Mapping[str, str]) -> str:
    """The stage of the innermost function that raised it and is known; otherwise that function's name."""
    if isinstance(error.__context__, type(error)):  # it was raised again, with more to say
        error = error.__context__
    trace, name, found = error.__traceback__, "", None
    while trace is not None:
        name = trace.tb_frame.f_code.co_name
        found = stages.get(name, found)
        trace = trace.tb_next
    return found or name
