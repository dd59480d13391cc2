"""The environments of rollouts, for rewards: they live in other processes, and are reached through the worker."""

from typing import Any

from policy_trainer.data.problem import EnvironmentReference
from policy_trainer.processes.messages import Connection, ProcessEnded
from policy_trainer.processes.user_socket import connect

# The environments that live in this process, by key.
LIVE: dict[str, Any] = {}


def environment(reference: EnvironmentReference | None) -> Any:
    """What rewards get in their argument `environments`: the environment itself if it lives in this process."""
    if reference is None:
        return None
    return LIVE[reference.key] if reference.key in LIVE else EnvironmentProxy(reference)


class EnvironmentProxy:
    """Reads attributes and calls methods of an environment in another process. Values must be JSON's.

    Raises AttributeError for what the environment does not have and for private names, and RuntimeError for what its
    code raises.
    """

    def __init__(self, reference: EnvironmentReference) -> None:
        object.__setattr__(self, "_reference", reference)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name}: rewards get only the public attributes of an environment")
        answer = self._ask("get", name=name)
        if "method" not in answer:
            return answer["value"]

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self._ask("invoke", name=name, arguments=arguments, keywords=keywords)["value"]

        async def call_async(*arguments: Any, **keywords: Any) -> Any:
            return call(*arguments, **keywords)

        return call_async if answer["method"] == "async" else call

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a reward cannot change the attributes of an environment")

    def _ask(self, do: str, **request: Any) -> dict[str, Any]:
        reference: EnvironmentReference = object.__getattribute__(self, "_reference")
        with connect(reference.relay) as relay:
            try:  # the worker limits the time
                answer = Connection(relay).ask(do, None, session=reference.session, **request)
            except ProcessEnded:
                answer = {"error": "the worker does not answer"}
        if "error" in answer:
            error = AttributeError if answer.get("raised") == "AttributeError" else RuntimeError
            raise error(f"environment: {answer['error']}")
        return answer
