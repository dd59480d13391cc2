"""The command `ref-server score`: log-probs of completions under the reference model."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator
from rich.console import Console, Group, RenderableType
from rich.progress import track
from rich.text import Text

from ref_server.cli.connection import ClientOptions, complain, explained, load_options
from ref_server.cli.terminal import print_error, show, table
from shared import wire
from shared.api import Logprobs, LogprobsRequest
from shared.batch import MAX_TEMPERATURE, MIN_TEMPERATURE, Batch, BatchError
from shared.client import ClientError, RefServerClient, RefServerError
from shared.errors import printable, printable_json
from shared.settings import Verbatim

_NUMBERS = ("log-prob", "probability")
# Requests to a busy server are retried for this long. The first request is not retried.
_PATIENCE_SECONDS = 120.0


class Score(ClientOptions):
    """Scores completions with the server's reference model; nothing is queued and nothing is stored.

    One of three:

      ref-server score --prompt "2+3=" --completion "5" --completion "6"
      ref-server score --file prompts.jsonl > scores.jsonl
      ref-server score --file batch.safetensors --output scored.safetensors

    Each line of JSONL is {"prompt": "…", "completions": ["…", …]} or {"prompt_ids": […], "completions": [[…], …]}, with
    an optional "temperature"; each gives one line of JSON, {"error": …} where the server refuses it. --file - reads
    standard input. Prompt and completions are tokenised separately, without special tokens. The exit status is 0, 1
    when the server refused something or does not answer, 2 when the command was not understood.
    """

    prompt: str | None = None
    """The text that the completions continue."""
    completion: Annotated[list[str], Verbatim()] = Field(default=[])
    """A text to be scored; may be repeated. It is used unchanged."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Logits are divided by it. A file has its temperature."""
    file: Path | None = None
    """A batch (.safetensors), or JSONL; - is standard input."""
    output: Path | None = None
    """With a batch: the file to write the scored batch to. Without it the log-probs are printed."""

    @model_validator(mode="after")
    def _texts_or_a_file(self) -> Self:
        if (self.prompt is None) == (self.file is None):
            raise ValueError("give --prompt with at least one --completion, or --file; one of the two")
        if (self.prompt is None) != (not self.completion):
            raise ValueError("--prompt and --completion go together")
        if self.output is not None and not self.is_batch:
            raise ValueError("--output goes with a batch, --file NAME.safetensors; the rest goes to standard output")
        return self

    @property
    def is_batch(self) -> bool:
        return self.file is not None and self.file.suffix == ".safetensors"


def run(arguments: list[str]) -> int:
    options = load_options(Score, arguments, "score")
    try:
        with options.connect() as client:
            client.model()  # fails at once where no server answers
        with options.connect(
            patience=_PATIENCE_SECONDS,
            on_wait=lambda reason, seconds: _print_reason(f"waiting, {seconds:.0f} s so far: {reason}"),
        ) as client:
            return _score(client, options)
    except ClientError as error:
        return complain("score", error)
    except (BatchError, OSError, UnicodeDecodeError) as error:
        _print_reason(str(error))
        return 1


def _score(client: RefServerClient, options: Score) -> int:
    if options.prompt is not None:
        answer = client.logprobs(options.prompt, options.completion, temperature=options.temperature)
        return _print_logprobs(answer, options)
    assert options.file is not None, "checked with the options"
    if not options.is_batch:
        return _score_lines(client, options.file)
    batch = wire.decode(options.file.read_bytes()).without_scores()
    if options.output is not None:
        return _write(client.score(batch), options)
    return _print_logprobs(_logprobs(client, batch), options)


def _logprobs(client: RefServerClient, batch: Batch) -> Logprobs:
    completions = [ids.tolist() for ids in batch.group.completions()]
    return client.logprobs_of_ids(batch.group.prompt_ids.tolist(), completions, temperature=batch.temperature)


def _write(scored: Batch, options: Score) -> int:
    assert options.output is not None
    options.output.write_bytes(wire.encode(scored))
    about = {
        "id": scored.id,
        "completions": scored.group.size,
        "completion_tokens": len(scored.group.completion_ids),
        "reference_version": scored.reference_version,
        "output": str(options.output),
    }
    if options.as_json:
        print(json.dumps(about, indent=2))
    else:
        counted = f"{about['completion_tokens']} tokens of {about['completions']} completions"
        print(f"{counted} are scored in {options.output}")
    return 0


def _print_logprobs(answer: Logprobs, options: Score) -> int:
    if options.as_json:
        print(printable_json(answer.model_dump_json(indent=2)))
    else:
        show(_logprob_sheet(answer))
    return 0


def _logprob_sheet(answer: Logprobs) -> Group:
    """Each completion's tokens with their log-probs, and the sum, the mean and the perplexity."""
    parts: list[RenderableType] = []
    for number, (logps, texts) in enumerate(zip(answer.logprobs, answer.tokens, strict=True)):
        rows = table("token", *_NUMBERS, numbers=_NUMBERS)
        for logp, text in zip(logps, texts, strict=True):
            rows.add_row(Text(_quoted(text)), f"{logp:.4f}", f"{math.exp(logp):.4f}")
        parts += [Text(f"completion {number}: {_summarise(logps)}"), rows, Text()]
    return Group(*parts, Text(f"reference version {answer.reference_version}"))


def _summarise(logps: list[float]) -> str:
    total = math.fsum(logps)
    mean = total / len(logps)
    return (
        f"{len(logps)} tokens, log-prob {total:.4f}, {mean:.4f} a token, perplexity {math.exp(min(-mean, 700.0)):.4g}"
    )


def _quoted(text: str | None) -> str:
    """In quotes, so that blanks are visible."""
    return "?" if text is None else f"'{printable(text)}'"


def _score_lines(client: RefServerClient, file: Path) -> int:
    """Prints a line of JSON for each line, in order. An error in one does not stop the others."""
    failed = 0
    for number, line in enumerate(_lines(file), start=1):
        try:
            print(printable_json(_score_line(client, line).model_dump_json()), flush=True)
        except (RefServerError, ValidationError) as error:
            failed += 1
            reason = explained(error) if isinstance(error, RefServerError) else _first_fault(error)
            print(json.dumps({"error": reason}), flush=True)
            _print_reason(f"line {number}: {reason}")
    return 1 if failed else 0


def _score_line(client: RefServerClient, line: str) -> Logprobs:
    request = LogprobsRequest.model_validate_json(line)
    completions: list[Any] = list(request.completions)
    if request.prompt is not None:
        return client.logprobs(request.prompt, completions, temperature=request.temperature)
    return client.logprobs_of_ids(request.prompt_ids or [], completions, temperature=request.temperature)


def _lines(file: Path) -> Iterator[str]:
    """Lines that are not empty. While it reads a file, a terminal shows a progress bar."""
    if str(file) == "-":
        yield from _filled(sys.stdin)
        return
    with file.open(encoding="utf-8") as lines:
        total = sum(1 for _ in _filled(lines))
        lines.seek(0)
        console = Console(stderr=True)
        quiet = not console.is_terminal or sys.stdout.isatty()
        yield from track(
            _filled(lines), description="scoring", total=total, console=console, transient=True, disable=quiet
        )


def _filled(lines: IO[str]) -> Iterator[str]:
    return (line for line in lines if line.strip())


def _first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _print_reason(line: str) -> None:
    print_error(f"ref-server score: {line}")
