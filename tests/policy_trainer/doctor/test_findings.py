"""An error is split into what is wrong and what to do."""

from policy_trainer.doctor.findings import Verdict, refused
from policy_trainer.lifecycle.endings import RunFailed
from shared.errors import UserError


def test_what_to_do_stands_behind_the_semicolon() -> None:
    finding = refused(UserError("device: there is no cuda:1 here; use auto; or cpu"))
    assert finding.verdict is Verdict.WRONG
    assert (finding.seen, finding.remedy) == ("device: there is no cuda:1 here", "use auto; or cpu")


def test_or_behind_the_first_line() -> None:
    finding = refused(RunFailed("run: another trainer trains it; it lives.\nStop that one"))
    assert (finding.seen, finding.remedy) == ("run: another trainer trains it; it lives.", "Stop that one")


def test_a_process_that_died_is_told_by_its_last_line() -> None:
    words = (
        "the worker died with status 2; its last output:\ninfo: it begins\nrewards: no such name\nall of it is in /x"
    )
    finding = refused(RunFailed(words))
    assert (finding.seen, finding.remedy) == ("the worker died with status 2", "rewards: no such name")
