"""The command `ref-server queue stats`."""

from ref_server.cli.connection import ClientOptions, load_options
from ref_server.cli.queue.tables import stats_sheet
from ref_server.cli.terminal import print_json, show


class StatsOptions(ClientOptions):
    """Batches and MiB by run and state, how much of each limit is used, how long the oldest batch has waited, and the
    throughput of scoring.
    """


def run(arguments: list[str]) -> int:
    options = load_options(StatsOptions, arguments, "queue stats")
    with options.connect() as client:
        stats = client.queue()
    if options.as_json:
        print_json(stats)
    else:
        show(stats_sheet(stats))
    return 0
