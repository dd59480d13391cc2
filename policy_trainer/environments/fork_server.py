"""The process that imports the user's modules once, and forks a child for each session.

It has no thread and does nothing else, so that forking is safe and takes milliseconds. The worker sends requests over a
socket that no other process has, one at a time: `open` comes with the session's connection. The children end with their
parent, and what they have started ends with them.
"""

import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from numpy import random as numpy_random

from policy_trainer.environments.host import Host, serve
from policy_trainer.environments.toolbox import Toolbox
from policy_trainer.lifecycle.keeper import adopt_orphans, children, end_with_creator, kill_children
from shared.errors import UserError
from shared.process import PARENT_VARIABLE

# How often it looks for children that have ended, and whether its parent is there.
_TICK = 0.2


class ForkServer:
    def __init__(self, control: socket.socket, toolbox: Toolbox) -> None:
        self._control = control
        self._toolbox = toolbox
        self._parent = os.getppid()
        self._pids: dict[int, int] = {}  # by session
        self._codes: dict[int, int] = {}  # of sessions that ended by themselves
        adopt_orphans()
        self._others = children()  # started by the user's modules

    def run(self) -> None:
        """Until the worker is gone."""
        while os.getppid() == self._parent:
            readable, _, _ = select.select([self._control], [], [], _TICK)
            if readable:
                message, descriptors, _, _ = socket.recv_fds(self._control, 1024, 1)
                if not message:
                    break
                request = json.loads(message)
                answer = self._open(request["open"], *descriptors) if descriptors else self._end(request["end"])
                self._control.sendall(json.dumps(answer).encode() + b"\n")
            for session, pid in [*self._pids.items()]:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    self._codes[session] = self._end(session)
        for session in [*self._pids]:
            self._end(session)

    def _open(self, session: int, descriptor: int) -> str | None:
        """Starts the session's process. Returns why that failed, None if it did not."""
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            return str(error)
        if pid:
            self._pids[session] = pid
            os.close(descriptor)
            return None
        try:
            self._serve(descriptor)
        except ConnectionError:  # the worker has stopped waiting
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _serve(self, descriptor: int) -> None:
        """In a session's process."""
        self._control.close()
        os.setsid()
        end_with_creator()
        adopt_orphans()
        numpy_random.seed()  # else all sessions had the same numbers
        host = Host(self._toolbox, threading.Lock(), separate=True)
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
            serve(stream, stream, host)
        os._exit(0)

    def _end(self, session: int) -> int:
        """Kills the session's process and all that it has started. Returns its exit code, negative for a signal."""
        pid = self._pids.pop(session, None)
        if pid is None:
            return self._codes.pop(session, 0)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # its group's number stays reserved
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not ended:  # it may not have its group yet
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        kill_children(but={*self._others, *self._pids.values()})  # those that have left its process group
        return os.waitstatus_to_exitcode(status)


def main(descriptor: int, tools: Iterable[str], environments: Iterable[str]) -> None:
    """Imports the modules, says whether that went well, and serves."""
    os.environ.pop(PARENT_VARIABLE, None)  # what the tools start must not inherit it
    with socket.socket(fileno=descriptor) as control:
        server = None
        try:
            toolbox = Toolbox.load([*tools], [*environments])
            if threads := [each.name for each in threading.enumerate() if each is not threading.main_thread()]:
                raise UserError(
                    f"tools: the modules of {', '.join([*tools, *environments])} start threads when they are imported "
                    f"({', '.join(threads)}), which rollouts' processes would not have",
                    "start them at the first call",
                )
        except UserError as error:
            refusal: Any = error.args
        except BaseException:  # a module may also raise SystemExit
            refusal = [f"tools: their modules cannot be loaded:\n{traceback.format_exc()}"]
        else:
            refusal, server = None, ForkServer(control, toolbox)
        control.sendall(json.dumps(refusal).encode() + b"\n")
        if server is None:
            return
        faulthandler.cancel_dump_traceback_later()
        gc.freeze()  # the children share what is there now
        server.run()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    main(int(sys.argv[1]), **json.loads(sys.argv[3]))
