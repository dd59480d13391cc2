"""The stage at which a decoder refused an input."""

from collections.abc import Mapping


def refused_in(error: BaseException, stages: Mapping[str, str]) -> str:
    """The stage of the innermost function of the traceback in `stages`; without one, the innermost function's name."""
    if isinstance(error.__context__, type(error)):  # it was re-raised with a longer message
        error = error.__context__
    trace, name, stage = error.__traceback__, "", None
    while trace is not None:
        name = trace.tb_frame.f_code.co_name
        stage = stages.get(name, stage)
        trace = trace.tb_next
    return stage or name
