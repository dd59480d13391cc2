"""Sessions: each rollout's environment and tools, in a process of its own, where they may hang or crash."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from pydantic_core import to_jsonable_python

from policy_trainer.config import CommonConfig
from policy_trainer.config.functions import CALLER
from policy_trainer.data.problem import EnvironmentReference
from policy_trainer.processes.messages import Connection, ProcessEnded, serve
from policy_trainer.processes.user_socket import UserSocket
from policy_trainer.rewards.failures import Failures
from policy_trainer.rollout.environments.connections import START_SECONDS, CallerSessions, ForkedSessions, Place
from policy_trainer.rollout.environments.toolbox import misfits
from shared.errors import UserError

_GIB = 2**30
_CLEAR_SECONDS = 10.0
# Names of an environment's rewards and of its reset, in counts of failures.
REWARD, TURN_REWARD, RESET = "environment", "environment/turns", "environment/reset"


@dataclass(frozen=True)
class ToolAnswer:
    """content: for the model. error: kind of the failure, empty if the call went well: unknown_tool, wrong_arguments,
    exception, too_slow, crashed, too_long, pictures. log: the end of what the call printed or raised."""

    content: str
    seconds: float
    error: str = ""
    log: str = ""


@dataclass(frozen=True)
class EnvironmentDescription:
    """label: `module:Class`. tools: JSON schemas of its methods. reserved: those of `toolbox.RESERVED` that it has."""

    label: str
    tools: Sequence[dict[str, Any]]
    reserved: Sequence[str]


class Sessions:
    """The tools and environments of the settings. Sessions may be opened and used from any thread."""

    def __init__(self, config: CommonConfig) -> None:
        """Raises UserError for tools and environments that cannot be imported, or described to the model."""
        self.limits = config.turns
        self.failures = Failures([REWARD, TURN_REWARD, RESET])
        self._labels = config.named_environments()
        self._here, self._caller = self._make_places(config.tools)
        self._lock = threading.Lock()
        self._free: dict[str | None, list[Session]] = defaultdict(list)
        self._used: dict[int, Session] = {}
        self._numbers = count()
        self._relay: UserSocket | None = None
        try:
            self._describe(config.tools)
            if self._labels:
                self._relay = UserSocket(lambda reward: serve(reward, self._inspect), "relay")
        except BaseException:
            self.close()
            raise

    def _make_places(self, tools: Sequence[str]) -> tuple[ForkedSessions | None, CallerSessions | None]:
        named = [("tools", label) for label in tools] + [("environment", label) for label in self._labels.values()]
        here = [(setting, label) for setting, label in named if not _is_callers(label)]
        caller = next((CallerSessions(label, setting) for setting, label in named if _is_callers(label)), None)
        if not here:
            return None, caller
        chosen = {kind: [label for setting, label in here if setting == kind] for kind in ("tools", "environment")}
        return ForkedSessions(chosen["tools"], chosen["environment"]), caller

    def _describe(self, tools: Sequence[str]) -> None:
        descriptions = [_description(place) for place in (self._here, self._caller) if place]
        schemas = {label: schema for each in descriptions for label, schema in each["tools"].items()}
        described = {label: parts for each in descriptions for label, parts in each["environments"].items()}
        self._schemas = [schemas[label] for label in tools]
        # Of the tools that belong to no environment.
        self.places: Mapping[str, Place] = {_name(schemas[label]): self.place(label) for label in tools}
        self.environments: Mapping[str, EnvironmentDescription] = {
            name: EnvironmentDescription(label, **described[label]) for name, label in self._labels.items()
        }
        for name in [None, *self._labels]:
            offered = [_name(schema) for schema in self.schemas(name)]
            if twice := [each for each in offered if offered.count(each) > 1]:
                raise UserError(f"tools: {twice[0]} is the name of two that the model gets together", "rename one")

    def place(self, label: str) -> Place:
        place = self._caller if _is_callers(label) else self._here
        assert place
        return place

    def schemas(self, name: str | None) -> list[dict[str, Any]]:
        """Of the tools that a rollout in this environment has; None for those without an environment."""
        return [*self._schemas, *(self.environments[name].tools if name is not None else ())]

    def open(self, environment: str | None) -> "Session":
        """A session with an environment of this name, an idle one if there is any. None: only tools.

        Raises UserError if it cannot be made.
        """
        with self._lock:
            number, free = next(self._numbers), self._free[environment]
            while free and not free[-1].alive:
                free.pop().close()
            session = free.pop() if free else None
        session = session or Session(self, environment)
        session.number = number  # a reward that comes late must not reach the next rollout
        with self._lock:
            self._used[number] = session
        return session

    @property
    def used(self) -> "list[Session]":
        """The sessions that are open and not given back."""
        with self._lock:
            return [*self._used.values()]

    def give_back(self, session: "Session") -> None:
        """Keeps it for another rollout; closes it if it cannot go on, or a call is under way."""
        with self._lock:
            if self._used.pop(session.number, None) is not session:
                return  # it was given back already
        if not session.clear():
            session.close()
            return
        with self._lock:
            self._free[session.environment].append(session)

    @property
    def relay(self) -> str:
        """Where rewards reach the environments."""
        return self._relay.path if self._relay else ""

    def close(self) -> None:
        if self._relay:
            self._relay.close()
        with self._lock:
            free = [session for sessions in self._free.values() for session in sessions]
        for session in (*self.used, *free):
            session.close()
        if self._here:
            self._here.close()

    def _inspect(self, request: dict[str, Any]) -> Mapping[str, Any]:
        """The answer to a reward's request."""
        session = self._used.get(request.pop("session"))
        return session.inspect(**request) if session else {"error": "its rollout has ended"}


class Session:
    """A rollout's environment and tools, or the tools without an environment. Not for several rollouts at a time."""

    def __init__(self, sessions: Sessions, environment: str | None) -> None:
        """Use Sessions.open, which gives a number to each use."""
        self.number, self.environment, self.key = -1, environment, ""
        self._sessions = sessions
        self._limits = sessions.limits
        self._description = None if environment is None else sessions.environments[environment]
        self._home = None if self._description is None else sessions.place(self._description.label)
        self._schemas = {_name(schema): schema for schema in sessions.schemas(environment)}
        self._connections: dict[Place, Connection] = {}
        self._broken = ""  # why the environment is gone
        if self._home is not None:
            self._connect(self._home)

    @property
    def alive(self) -> bool:
        """Whether its environment can go on. Tools without one always can."""
        return not self._broken and (self._home is None or self._connections[self._home].alive)

    @property
    def lost(self) -> bool:
        """Whether its environment is gone."""
        return bool(self._broken)

    @property
    def reference(self) -> EnvironmentReference | None:
        """For rewards; None without an environment."""
        return EnvironmentReference(self._sessions.relay, self.number, self.key) if self._home else None

    def reset(self, columns: Mapping[str, Any], seed: int) -> str | None:
        """Begins a rollout. Returns what the environment shows. seed: of `random` and numpy.

        Raises UserError if its code raises, takes too long or ends its process.
        """
        assert self._home is not None and self._description is not None
        what = f"environment: {self._description.label}.reset"
        if self._broken:
            raise UserError(f"{what}: the environment is gone: it {self._broken}")
        try:
            row = to_jsonable_python(dict(columns), bytes_mode="base64", inf_nan_mode="constants")
            answer = self._ask(self._home, "reset", self._limits.seconds, columns=row, seed=seed)
        except ValueError as error:
            raise UserError(f"{what}: a column of the row cannot be sent to it: {error}") from None
        except ProcessEnded as ended:
            raise UserError(f"{what} {_explained(ended)}") from None
        if "error" in answer:
            unexpected = answer["kind"] == "exception"
            raise UserError(f"{what} raised {answer['raised']}:\n{answer['log']}" if unexpected else answer["error"])
        return answer["value"]

    def call(self, name: str, arguments: Mapping[str, Any], *, most_seconds: float = math.inf) -> ToolAnswer:
        """The answer of a tool. Never raises for what a tool does. most_seconds: a limit besides turns.seconds."""
        began = time.monotonic()
        content, error, log = self._called(name, arguments, min(self._limits.seconds, most_seconds))
        return ToolAnswer(content, time.monotonic() - began, error, log)

    def _called(self, name: str, arguments: Mapping[str, Any], seconds: float) -> tuple[str, str, str]:
        """content, error and log of the answer."""
        if name not in self._schemas:
            known = ", ".join(self._schemas) or "none"
            return _failure("unknown_tool", f"there is no tool {name!r:.100}; available: {known}")
        if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
            return _failure("wrong_arguments", "the arguments must be a JSON object")
        if self._broken:
            return _failure("crashed", f"the environment is gone: it {self._broken}")
        if seconds <= 0:
            return _failure("too_slow", "there is no time left")
        place = self._sessions.places.get(name, self._home)
        assert place is not None
        try:
            answer = self._ask(place, "call", seconds, name=name, arguments=arguments)
        except ProcessEnded as ended:
            return _failure("too_slow" if ended.too_slow else "crashed", str(ended))
        except UserError as error:
            return _failure("crashed", str(error))
        except (TypeError, ValueError, RecursionError) as error:
            return _failure("wrong_arguments", f"the arguments are no JSON: {error}")
        if "error" not in answer:
            return answer["value"], answer["kind"], answer["log"]
        wrong = answer["raised"] == "TypeError" and misfits(self._schemas[name], arguments)
        return _failure("wrong_arguments" if wrong else answer["kind"], answer["error"], answer["log"])

    def reward(self) -> float | None:
        """What get_reward returns, None if there is no such method; NaN if it failed or the environment is gone, which
        is logged and counted.

        Raises RewardsFailed if it has failed in every rollout.
        """
        return self._reward("get_reward", REWARD)

    def step_reward(self) -> float | None:
        """What get_step_reward returns, as `reward`; None without that method, even if the environment is gone."""
        return self._reward("get_step_reward", TURN_REWARD)

    def _reward(self, method: str, name: str) -> float | None:
        if self._home is None or self._description is None:
            return None
        if method not in self._description.reserved and not (self._broken and name == REWARD):
            return None
        reason, gone = self._broken, self.lost
        if not gone:
            try:
                answer = self._ask(self._home, "reward", self._limits.seconds, method=method)
            except ProcessEnded as ended:
                reason = _explained(ended)
            else:
                failure = {"error": answer.get("log") or answer.get("error"), "kind": answer.get("raised")}
                judged = failure if "error" in answer else {"score": answer["value"]}
                return self._sessions.failures.scores(name, [judged])[0]
        self._sessions.failures.lost(name, f"the environment {reason}", count=1, at_fault=not gone)
        return math.nan

    def inspect(self, do: str, **request: Any) -> Mapping[str, Any]:
        """Answers a reward: `get` or `invoke` of `Host`."""
        if self._home is None or self._broken or do not in ("get", "invoke"):
            return {"error": f"it is gone: it {self._broken}"}
        try:
            return self._ask(self._home, do, self._limits.seconds, **request)
        except ProcessEnded as ended:
            return {"error": f"it {_explained(ended)}"}

    def release(self) -> None:
        """Gives it back, for another rollout; ends its process if it is broken."""
        self._sessions.give_back(self)

    def clear(self) -> bool:
        """Kills what its rollout has started. Returns whether the session can be used again."""
        for place, connection in [*self._connections.items()] if self.alive else ():
            try:
                if connection.alive:
                    self._ask(place, "clear", _CLEAR_SECONDS)
            except ProcessEnded:
                pass  # broken already, or the connection was dropped
        return self.alive

    def close(self) -> None:
        """Ends its processes. Calls under way fail."""
        self._broken = self._broken or "was closed"
        for connection in [*self._connections.values()]:
            connection.close()

    def _ask(self, place: Place, do: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Raises ProcessEnded, after which the environment is gone if it was there."""
        connection = self._connections.get(place) or self._connect(place)
        try:
            return connection.ask(do, seconds, **arguments)
        except ProcessEnded as ended:
            if place is self._home:
                self._broken = _explained(ended)
            else:
                self._connections.pop(place, None)
            raise

    def _connect(self, place: Place) -> Connection:
        label = self._description.label if self._description and place is self._home else None
        connection = place.connect()
        most, memory = self._limits.max_answer_characters, int(self._limits.memory_gib * _GIB)
        answer = _answered(connection, "open", environment=label, most_characters=most, memory=memory)
        if place is self._home:
            self.key = answer["value"]
        self._connections[place] = connection
        return connection


def _description(place: Place) -> Mapping[str, Any]:
    connection = place.connect()
    answer = _answered(connection, "describe")
    connection.close()
    return answer["value"]


def _answered(connection: Connection, do: str, **arguments: Any) -> Mapping[str, Any]:
    """Raises UserError, and closes the connection, if the answer is a failure."""
    label = arguments.get("environment")
    what = f"environment: {label}()" if label else f"tools: to {do} them"
    try:
        answer = connection.ask(do, START_SECONDS, **arguments)
    except ProcessEnded as ended:
        raise UserError(f"{what} {ended}") from None
    if "error" in answer:
        connection.close()
        refused = answer["kind"] == "refused"
        raise UserError(answer["error"] if refused else f"{what} raised {answer['raised']}:\n{answer['log']}")
    return answer


def _is_callers(label: str) -> bool:
    return label.startswith(f"{CALLER}:")


def _name(schema: Mapping[str, Any]) -> str:
    return schema["function"]["name"]


def _explained(ended: ProcessEnded) -> str:
    return f"{ended} (turns.seconds)" if ended.too_slow else str(ended)


def _failure(kind: str, reason: str, log: str = "") -> tuple[str, str, str]:
    """As TRL, which gives the model the text of a dict."""
    return str({"error": reason}), kind, log
