"""Rewards that run in the process that began the training: functions of a notebook, closures, lambdas.

No other process can import them. So samples go to them and answers come back as JSON over HTTP, on the loopback. Where,
and the token, stand in an environment variable that the caller gives its children.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from policy_trainer.data.sample import Sample, Score
from policy_trainer.rewards.sandbox.answers import refusal
from policy_trainer.rewards.sandbox.failures import Failures
from shared.errors import UserError

# PORT:TOKEN of the caller's server.
ADDRESS_VARIABLE = "TANDEM_CALLER"
# `caller:NAME` in `rewards` is the function of this name.
MODULE = "caller"

_SAMPLES = TypeAdapter(list[Sample])


@dataclass(frozen=True)
class Address:
    """Where the caller answers on 127.0.0.1, and the token that it asks for."""

    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.port}:{self.token}"


def read_address(name: str) -> Address:
    """The caller's address, from the environment. Raises UserError if this process has no such caller."""
    port, _, token = os.environ.get(ADDRESS_VARIABLE, "").partition(":")
    if not token:
        raise UserError(
            f"rewards: {name} is a function of the Python program that began the run, and lives only there: "
            "continue with policy_trainer.GRPO there, or name other --rewards"
        )
    return Address(int(port), token)


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """JSON. In columns of the data, dates become texts in ISO form, bytes URL-safe base64."""
    return json.dumps(to_jsonable_python(list(samples), bytes_mode="base64", inf_nan_mode="constants")).encode()


def decode_samples(body: bytes) -> list[Sample]:
    return _SAMPLES.validate_python(json.loads(body))


class CallersReward:
    """A function of the caller's process, known here by name. All samples of a round are judged in one call.

    If the call fails or takes too long, it costs the reward of these samples, which is logged and counted. The function
    cannot be killed: where it hangs, it keeps later calls waiting until they take too long, too.
    """

    def __init__(self, name: str, *, seconds: float) -> None:
        """name: with its module, as `caller:concise`. seconds: time limit of one sample. Raises UserError if this
        process has no caller."""
        self._name = name
        self._seconds = seconds
        self._address = read_address(name)
        self.failures = Failures([name])

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample; NaN where there is none. Raises UserError for a function that cannot be used."""
        if not samples:
            return []
        limit = self._seconds * len(samples)
        try:
            answers = self._ask(encode_samples(samples), limit)
        except TimeoutError:
            each = f"judging.seconds = {self._seconds:g} for each of {len(samples)} completions"
            self.failures.add(self._name, f"took more than {limit:g} s ({each})", count=len(samples))
            return [math.nan] * len(samples)
        except (OSError, HTTPException) as error:
            raise UserError(
                f"rewards: the program that began the run does not answer for {self._name}: {error}"
            ) from error
        if reason := refusal(answers):
            raise UserError(reason)
        self.failures.judged(self._name, answers)
        return [answer.get("score", math.nan) for answer in answers]

    def _ask(self, body: bytes, seconds: float) -> list[dict[str, Any]]:
        connection = HTTPConnection("127.0.0.1", self._address.port, timeout=seconds)
        try:
            headers = {"Authorization": f"Bearer {self._address.token}", "Content-Type": "application/json"}
            connection.request("POST", f"/rewards/{self._name.partition(':')[2]}", body, headers)
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise HTTPException(f"status {response.status}")
            return json.loads(answer)["answers"]
        finally:
            connection.close()
