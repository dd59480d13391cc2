"""The command `ref-server queue requeue`."""

import json
from typing import Literal

from ref_server.cli.connection import load_options
from ref_server.cli.queue.several import SeveralOptions, batches_of_state, count_batches, for_each


class Requeue(SeveralOptions[Literal["dead", "expired"]]):
    """Restores dead or expired batches and sets their counts of deliveries and failed scorings to zero.

    A batch that cannot come back, because it was dropped or because the queue is full, is reported; the others go on.
    """


def run(arguments: list[str]) -> int:
    options = load_options(Requeue, arguments, "queue requeue")
    with options.connect() as client:
        ids = options.ids or [batch.id for batch in batches_of_state(client, options)]
        outcomes = for_each("requeued", ids, client.requeue)
    if options.as_json:
        requeued = [admitted.model_dump(mode="json") for admitted in outcomes.done]
        print(json.dumps({"requeued": requeued, "failed": outcomes.failed}, indent=2))
    else:
        outcomes.print_failures()
        print(f"{count_batches(len(outcomes.done))} brought back")
    return 1 if outcomes.failed else 0
