"""The command `ref-server queue`: inspects and manages the queue of a running server, over its HTTP API.

It asks the server, since only the server may change its store; `backup` reads the store itself.
"""

from importlib import import_module

from ref_server.cli.connection import complain
from shared.client import ClientError
from shared.commands import choose_name

DESCRIPTION = """Inspect and manage the queue of a running server, over HTTP.

Every command takes --url, or REF_SERVER_URL from the environment, to find the server; --token-file, or REF_SERVER_TOKEN
from the environment, to authenticate; --tls-ca for a certificate of a private authority; and --json to print for
programs. Only backup asks no server: it reads the store in --data-dir. The exit status is 0 on success, 1 when the
server refused something or does not answer, 2 when the command was not understood, and 130 after Ctrl-C.
"""
COMMANDS = {
    "stats": "batches and MiB by run and state, limits and their use, throughput",
    "ls": "batches, newest first; --state dead finds those that need attention",
    "show": "one batch with its history; --tokens adds its texts and rewards",
    "requeue": "restore dead or expired batches",
    "purge": "drop batches for good",
    "backup": "copy a queue on SQLite to a file, while a server uses it",
}
# The module of each command's function run_COMMAND.
_MODULES = {
    "stats": "views",
    "ls": "views",
    "show": "views",
    "requeue": "changes",
    "purge": "changes",
    "backup": "backup",
}


def run(arguments: list[str]) -> int:
    name = choose_name("ref-server queue", DESCRIPTION, COMMANDS, arguments)
    module = import_module(f"{__name__}.{_MODULES[name]}")
    try:
        return getattr(module, f"run_{name}")(arguments[1:])
    except ClientError as error:
        return complain(f"queue {name}", error)
