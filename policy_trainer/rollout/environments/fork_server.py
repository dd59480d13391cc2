"""The process that imports the user's modules once, and forks a child for each session.

The first request names the modules. The children end with their parent, and what they have started ends with them.
"""

import gc
import os
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import partial

from numpy import random as numpy_random

from policy_trainer.processes.forking import Forks
from policy_trainer.processes.keeper import adopt_orphans, end_with_creator
from policy_trainer.processes.limits import watchdog
from policy_trainer.processes.messages import receive, reply, serve
from policy_trainer.processes.user_code import guard
from policy_trainer.processes.user_output import UserOutput
from policy_trainer.rollout.environments.host import Host
from policy_trainer.rollout.environments.toolbox import Toolbox
from shared.errors import UserError
from shared.process import PARENT_VARIABLE


def main(descriptor: int) -> None:
    """Imports the modules, says whether that went well, and forks."""
    os.environ.pop(PARENT_VARIABLE, None)  # what the tools start must not inherit it
    with socket.socket(fileno=descriptor) as control:
        request, _ = receive(control)
        with watchdog(request["seconds"], file=2):
            loaded = _load(request["tools"], request["environments"])
        refusal = None if isinstance(loaded, Toolbox) else loaded
        reply(control, request["number"], {"refusal": refusal})
        if not isinstance(loaded, Toolbox):
            return
        gc.freeze()  # the children share what is there now
        adopt_orphans()
        begun = (forks := Forks(control)).serve()
        if begun is None:
            forks.end_all()
            return
    try:
        _serve(begun[1][0], loaded)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _load(tools: Sequence[str], environments: Sequence[str]) -> Toolbox | Sequence[str]:
    """The imported toolbox; or why it cannot be used, as the arguments of a UserError."""
    try:
        toolbox = Toolbox.load(tools, environments)
    except UserError as error:
        return error.args
    except BaseException:  # a module may also raise SystemExit
        return [f"tools: their modules cannot be loaded:\n{traceback.format_exc()}"]
    if threads := [each.name for each in threading.enumerate() if each is not threading.main_thread()]:
        return [
            f"tools: the modules of {', '.join([*tools, *environments])} start threads when they are imported "
            f"({', '.join(threads)}), which rollouts' processes would not have",
            "start them at the first call",
        ]
    return toolbox


def _serve(descriptor: int, toolbox: Toolbox) -> None:
    """In a session's process."""
    end_with_creator()
    adopt_orphans()
    numpy_random.seed()  # else all sessions had the same numbers
    output = UserOutput()
    host = Host(toolbox, threading.Lock(), output)
    with socket.socket(fileno=descriptor) as connection:
        serve(connection, host.answer, partial(guard, output))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
