"""Renewal scores with the right reference at every step, wherever the run is killed; weights are worked out anew."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import OptimizerConfig, ReferenceConfig, TrainConfig
from policy_trainer.learner.learner import Learner
from policy_trainer.learner.optimizer import make_weights
from policy_trainer.processes.lifecycle.endings import RunFailed, Stopped
from policy_trainer.run_files.checkpoint import Checkpoints, RunFiles, TrainState, read_state, restore
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.weights.reference.renewal import choose_renewal
from shared import wire
from shared.api import WeightsFile
from shared.client import Leased, RefServerClient, RefServerError
from shared.errors import UserError
from shared.models import load_model, load_tokenizer, tokenizer_fingerprint

Make = Callable[..., PreTrainedModel]
EVERY, CHECKPOINT_EVERY = 2, 3


class RefServer:
    """PUT /v1/reference as API.md has it, in a few attributes. weights: as read at the request.

    staged, committed: files of published weights. Of the committed ones it only keeps the reference.
    """

    def __init__(self, open_site: Callable[..., Any], root: Path | None) -> None:
        self.root = root
        self.errors: list[tuple[int, str]] = []
        self.asked: list[tuple[str, int]] = []
        self.site = open_site(self.respond)
        self.restart()

    def restart(self) -> None:
        self.snapshot: str | None = None
        self.version = self.wanted_version = 0
        self.weights: dict[str, Tensor] = {}
        self.staged: dict[str, dict[str, bytes]] = {}
        self.committed: dict[str, dict[str, bytes]] = {}

    def respond(self, request: Any) -> Any:
        if request.path == "/v1/logprobs" and not self.errors:
            batch = wire.decode(request.body)
            assert batch.ref_logps is None
            logps = np.full(len(batch.group.completion_ids), -0.5, np.float32)
            return self.site.answer(
                200, wire.encode(replace(batch, ref_logps=logps, reference_version=str(self.version)))
            )
        status, answer = self.published(request) if "/weights/" in request.path else self.reference(request)
        return self.site.answer(status, json.dumps(answer).encode())

    def published(self, request: Any) -> tuple[int, Any]:
        at = request.path.removeprefix("/v1/")
        if request.method == "PUT":
            name, _, file = at.rpartition("/")
            self.staged.setdefault(name, {})[file] = request.body
            return 201, _about(request.body)
        name = at.removesuffix("/commit")
        if request.method == "POST":
            self.committed[name] = {file: self.staged[name][file] for file in json.loads(request.body)["files"]}
        if name not in self.committed:
            return self.error(404, "not_found")
        _, run, lineage, epoch, version = name.split("/")
        files = {file: _about(content) for file, content in self.committed[name].items()}
        return 200, {"run": run, "lineage": lineage, "epoch": int(epoch), "version": int(version), "files": files}

    def reference(self, request: Any) -> tuple[int, Any]:
        if request.path == "/v1/logprobs":
            return self.error(*self.errors.pop(0))
        return self.model() if request.method == "GET" else self.put(json.loads(request.body))

    def put(self, body: Any) -> tuple[int, Any]:
        if self.errors and self.errors[0][0] == 403:  # before the body is looked at
            return self.error(*self.errors.pop(0))
        return self.replace(**body) if body else self.error(422, "invalid_request")

    def model(self) -> tuple[int, Any]:
        nothing = dict.fromkeys(("name", "revision", "vocabulary_size", "context_length", "dtype", "device"))
        nothing |= dict.fromkeys(("tokenizer_fingerprint", "forward"))
        return 200, {
            **nothing, "max_batch_tokens": 9, "reference_version": self.version, "snapshot": self.snapshot,
            "wanted_version": max(self.version, self.wanted_version),
        }  # fmt: skip

    def replace(self, snapshot: str, version: int) -> tuple[int, Any]:
        self.asked.append((snapshot, version))
        if self.errors:
            return self.error(*self.errors.pop(0))
        if self.root is None and not snapshot.startswith("weights/"):
            return self.error(409, "no_snapshot_root")
        files = self.committed.get(snapshot) or (_files(self.root / snapshot) if self.root else {})
        if "config.json" not in files:
            return self.error(404, "not_found")
        if (snapshot, version) != (self.snapshot, self.version):
            if version <= max(self.version, self.wanted_version):
                return self.error(409, "older_version")
            self.snapshot, self.version = snapshot, version
            self.weights = load(files["model.safetensors"])
            self.committed = {name: kept for name, kept in self.committed.items() if name == snapshot}
        return 200, {"reference_version": version}

    def error(self, status: int, code: str) -> tuple[int, Any]:
        return status, {"error": {"code": code, "message": f"it is {code}", "request_id": "1"}}


def _about(content: bytes) -> dict[str, Any]:
    return WeightsFile(bytes=len(content), sha256=sha256(content).hexdigest()).model_dump()


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*")}


def drift(step: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """What a step adds to a parameter: a function of the step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype) / 8


@dataclass
class Run:
    """One run over its lives: a policy whose weights are a function of the step, checkpoints, and the server."""

    root: Path
    directory: Path
    server: RefServer
    client: RefServerClient
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    decay: float = 0.0
    every: int = EVERY
    name: str = "test"
    keep: int = 2
    master_weights: Any = "float32"
    place: Any = "directory"
    notes: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    on_wait: Callable[[str, float], None] = lambda reason, seconds: None

    def begin(self) -> "Life":
        return Life(self)

    def served(self, reference: str) -> str:
        """What the server calls it."""
        if self.place == "directory":
            return reference
        epoch, version = map(int, reference.removeprefix(f"{self.name}/epoch-").split("-version-"))
        return f"weights/{self.name}.reference/first/{epoch}/{version}"

    def policy(self, step: int) -> dict[str, Tensor]:
        """The optimizer's parameter after so many steps."""
        kept = torch.float32 if self.master_weights == "float32" else self.base.dtype
        weights = {name: weight.detach().to(kept) for name, weight in self.base.named_parameters()}
        for number in range(step):
            weights = {name: weight + drift(number, weight.shape, kept) for name, weight in weights.items()}
        return weights

    def reference(self, step: int) -> dict[str, Tensor]:
        """The right reference at a step, in float64."""
        reference = {name: weight.double() for name, weight in self.policy(0).items()}
        for renewed in range(self.every, step + 1, self.every):
            policy = self.policy(renewed)
            reference = {
                name: self.decay * weight + (1 - self.decay) * policy[name].double()
                for name, weight in reference.items()
            }
        return reference


class Life:
    """One process, from the newest checkpoint on: all that a trainer does except training."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.checkpoints = Checkpoints(run.directory / "checkpoints", keep=run.keep)
        newest = self.checkpoints.newest()
        self.state = read_state(newest) if newest else TrainState()
        self.state.epoch += newest is not None
        self.model = deepcopy(run.base)
        if newest:
            self.model = load_model(str(newest), revision=None, device="cpu", dtype="auto")
        self.weights = make_weights(self.model, OptimizerConfig(master_weights=run.master_weights))
        if newest:
            restore(newest, self.weights)
        self.renewal = self.choose(ReferenceConfig(sync_steps=run.every, decay=run.decay, snapshot_root=run.root))

    def choose(self, settings: ReferenceConfig) -> Any:
        learner: Any = SimpleNamespace(model=self.model, weights=self.weights)
        learner.state, learner.parameters = partial(Learner.state, learner), partial(Learner.parameters, learner)
        config = TrainConfig.model_construct(run=self.run.name, weights=self.run.place, reference=settings)
        files = RunFiles(RunDirectory(self.run.directory), self.checkpoints, None, self.state, "first")
        run = self.run
        return choose_renewal(config, files, learner, run.tokenizer, run.client, self.wait, run.notes.append)

    def wait(self, reason: str, seconds: float) -> None:
        self.run.waits.append(reason)
        self.run.on_wait(reason, seconds)

    def until(self, step: int) -> "Life":
        while True:
            self.renewal.ensure()
            assert_right(self)
            if self.state.step == step:
                return self
            self.update()
            if self.state.step % CHECKPOINT_EVERY == 0:
                self.save()

    @torch.no_grad()
    def update(self) -> None:
        for weight in self.weights.stepped.values():
            weight += drift(self.state.step, weight.shape, weight.dtype)
        for name, weight in self.model.named_parameters():
            weight.copy_(self.weights.stepped[name])
        self.state.step += 1

    def save(self) -> Path:
        return self.checkpoints.save(self.state, self.model, self.run.tokenizer, self.weights, self.renewal.average)


def assert_right(life: Life) -> None:
    """The server scores with the right reference, and the state names it."""
    run, server, state = life.run, life.run.server, life.state
    assert state.reference is not None
    assert (run.served(state.reference), state.reference_version) == (server.snapshot, server.version)
    expected = run.reference(state.step)
    dtype = run.base.dtype
    for name, weight in server.weights.items():
        assert weight.dtype == dtype
        torch.testing.assert_close(
            weight, expected[name].to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=1e-6
        )
    assert server.weights.keys() == expected.keys()
    if life.renewal.average is not None:
        for name, weight in life.renewal.average.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight.double(), expected[name], rtol=0, atol=1e-6)


def assert_kept(life: Life) -> None:
    """The references of the state and of all checkpoints exist."""
    for name in (life.state.reference, *life.checkpoints.references()):
        assert name is None or (life.run.root / name / "model.safetensors").exists()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


@pytest.fixture
def server(open_site: Callable[..., Any], root: Path) -> RefServer:
    return RefServer(open_site, root)


@pytest.fixture
def make_run(
    tmp_path: Path, root: Path, server: RefServer, make_tiny: Make, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Callable[..., Run]]:
    def make(*, dtype: torch.dtype = torch.float32, tied: bool = True, **settings: Any) -> Run:
        base = make_tiny(vocabulary=len(tokenizer), layers=1, dtype=dtype, tied=tied)
        settings = {"directory": tmp_path / "run", **settings}
        return Run(root=root, server=server, client=client, base=base, tokenizer=tokenizer, **settings)

    with RefServerClient(server.site.url, patience=None) as client:
        yield make


def stop(reason: str, seconds: float) -> None:
    raise Stopped


def snapshots(run: Run) -> list[str]:
    return sorted(path.relative_to(run.root).as_posix() for path in run.root.glob(f"{run.name}/*"))


@pytest.mark.parametrize(
    ("decay", "settings"),
    [
        (0.0, {}),
        (0.0, {"dtype": torch.bfloat16, "master_weights": "none"}),
        (0.75, {"tied": False}),
        (0.75, {"dtype": torch.bfloat16}),
        (0.75, {"dtype": torch.bfloat16, "master_weights": "none"}),
        (0.0, {"place": "server"}),
        (0.75, {"place": "server"}),
    ],
)
def test_every_step_is_scored_by_the_reference_of_the_formula(
    make_run: Callable[..., Run], decay: float, settings: dict[str, Any]
) -> None:
    run = make_run(decay=decay, **settings)
    if run.place == "server":
        run.server.root = None
    assert_kept(run.begin().until(7))
    assert run.server.asked == [(run.served(f"test/epoch-0000-version-0000000{n}"), n) for n in (1, 2, 3, 4)]
    assert "the reference is " + ("a moving average of " if decay else "") + "the policy at step 6" in run.notes[-1]


def test_batches_that_waited_during_a_renewal_are_scored_again(make_run: Callable[..., Run], make_scored: Any) -> None:
    run = make_run()
    life = run.begin().until(2)
    batches = [make_scored([3], [[4], [5]], [0.0, 1.0], number=number) for number in range(3)]
    leased = [
        Leased(replace(batch, reference_version=version), batch.id, "token", 1)
        for batch, version in zip(batches, ("1", "2", "1"), strict=True)
    ]
    first, second, third = life.renewal.rescored(leased)
    assert second.batch is leased[1].batch
    for lease, before in ((first, leased[0]), (third, leased[2])):
        assert (lease.id, lease.token, lease.batch.reference_version) == (before.id, "token", "2")
        assert lease.batch.ref_logps.tolist() == [-0.5, -0.5]

    run.server.errors = [(422, "invalid_batch")]
    (kept,) = life.renewal.rescored(leased[:1])
    assert kept.batch is leased[0].batch
    assert f"batch {leased[0].id} keeps the log-probs of an earlier reference" in run.notes[-1]
    run.server.errors = [(403, "forbidden")]
    with pytest.raises(RefServerError):
        life.renewal.rescored(leased[:1])


def test_a_copy_is_exact_and_brings_its_tokenizer(make_run: Callable[..., Run]) -> None:
    run = make_run()
    life = run.begin().until(2)
    assert life.state.reference is not None
    directory = str(run.root / life.state.reference)
    copy = load_model(directory, revision=None, device="cpu", dtype="auto")
    assert all(torch.equal(weight, copy.get_parameter(name)) for name, weight in life.model.named_parameters())
    both = (load_tokenizer(name) for name in (directory, str(life.save())))
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in both}) == 1


def test_a_slow_average_moves_under_bfloat16(make_run: Callable[..., Run]) -> None:
    """A hundredth of a step is mostly rounded away in bfloat16."""
    run = make_run(decay=0.99, every=1, dtype=torch.bfloat16)
    life = run.begin()
    life.renewal.ensure()
    before = {name: weight.clone() for name, weight in life.renewal.average.items()}
    life.update()
    for step in range(1, 10):
        life.state.step = step
        life.renewal.ensure()
    for name, weight in life.renewal.average.items():
        expected = life.weights.masters[name] - 0.99**9 * (life.weights.masters[name] - before[name])
        torch.testing.assert_close(weight, expected.detach(), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "restarts", "place"),
    [
        pytest.param(0.0, False, "directory", marks=pytest.mark.long),
        (0.5, True, "directory"),
        pytest.param(0.0, True, "server", marks=pytest.mark.long),
    ],
)
def test_a_crash_at_any_moment_leaves_a_run_that_goes_on_right(
    tmp_path: Path,
    make_run: Callable[..., Run],
    fuse: Any,
    monkeypatch: pytest.MonkeyPatch,
    decay: float,
    restarts: bool,
    place: str,
) -> None:
    """After the n-th file operation, or just before or after the server was told, for every n."""

    def burning(ask: Callable[..., Any]) -> Callable[..., Any]:
        def requested(*args: Any) -> Any:
            fuse.burn()
            answer = ask(*args)
            fuse.burn()
            return answer

        return requested

    for name in ("replace_reference", "put_weights", "commit_weights"):
        monkeypatch.setattr(RefServerClient, name, burning(getattr(RefServerClient, name)))
    for number in count(1):
        run = make_run(decay=decay, directory=tmp_path / str(number), name=f"run-{number}", keep=1, place=place)
        survived = fuse.lives(number, lambda run=run: run.begin().until(4))
        if restarts:
            run.server.restart()
        for step in (4, 6):  # and once more from a checkpoint of the second life
            assert_kept(run.begin())
            assert_kept(run.begin().until(step))
        if survived:
            assert number > 20
            break


class TestServer:
    def test_what_a_killed_life_has_renewed_is_undone_in_a_higher_version(self, make_run: Callable[..., Run]) -> None:
        run = make_run()
        run.begin().until(4)  # its checkpoint is of step 3, with the reference of step 2
        assert (run.server.snapshot, run.server.version) == ("test/epoch-0000-version-00000003", 3)
        life = run.begin()
        assert life.state.step == 3
        life.renewal.ensure()
        assert_right(life)
        assert (run.server.snapshot, run.server.version) == ("test/epoch-0000-version-00000002", 4)
        assert run.notes[-1] == "the reference is test/epoch-0000-version-00000002 again, version 4"
        life.until(4)
        assert (run.server.snapshot, run.server.version) == ("test/epoch-0001-version-00000005", 5)

    def test_one_that_was_restarted_is_told_again_before_the_next_step(self, make_run: Callable[..., Run]) -> None:
        run = make_run()
        life = run.begin().until(3)
        run.server.restart()
        life.until(3)
        assert run.notes[-1] == "the reference is test/epoch-0000-version-00000002 again, version 2"
        run.server.restart()
        life.until(4)  # which would renew it anyway
        assert run.server.version == 3

    def test_somebody_else_ends_the_run_and_its_next_life_takes_the_server_back(
        self, make_run: Callable[..., Run], tmp_path: Path
    ) -> None:
        mine, other = make_run(name="mine"), make_run(name="other", directory=tmp_path / "other")
        life = mine.begin().until(3)
        other.begin().until(0)
        with pytest.raises(
            RunFailed, match=r"by other/epoch-0000-version-00000003, version 3: .* needs its own server"
        ):
            life.until(3)
        mine.begin().until(5)

    def test_who_replaces_it_at_the_same_moment_is_waited_for(
        self, make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("policy_trainer.weights.reference.renewal._BUSY_SECONDS", 0.01)
        run = make_run()
        run.server.errors = [(409, "busy"), (409, "older_version")]
        run.begin().until(1)
        assert len(run.server.asked) == 3 and len(run.waits) == 2

    def test_who_is_stopped_meanwhile_saves_what_was(self, make_run: Callable[..., Run]) -> None:
        """The checkpoint that follows does not hold the renewal: the next life does it."""
        run = make_run(decay=0.5)
        life = run.begin().until(1)
        life.update()
        run.server.errors = [(409, "busy")]
        run.on_wait = stop
        with pytest.raises(Stopped):
            life.renewal.ensure()
        assert read_state(life.save()).renewed_at == 0
        run.on_wait = lambda reason, seconds: None
        run.begin().until(5)

    def test_an_answer_that_was_lost_replaces_nothing_twice(
        self, make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put = RefServerClient.replace_reference

        def lost(client: RefServerClient, snapshot: str, version: int) -> Any:
            put(client, snapshot, version)
            raise RefServerError(409, "loading still", code="busy")

        monkeypatch.setattr(RefServerClient, "replace_reference", lost)
        run = make_run()
        run.begin().until(1)
        assert len(run.server.asked) == 1

    def test_a_server_that_remembers_the_version_alone_gets_a_higher_one(self, make_run: Callable[..., Run]) -> None:
        """It lost its weights, not its queue."""
        run = make_run(place="server")
        life = run.begin().until(3)
        for remembered, step, versions in ((7, 3, [8]), (20, 4, [21, 22])):  # the step after renews it besides
            run.server.restart()
            run.server.wanted_version = remembered
            life.until(step)
            assert [version for _, version in run.server.asked[-len(versions) :]] == versions

    @pytest.mark.parametrize("place", ["directory", "server"])
    def test_nothing_is_asked_or_uploaded_twice_while_all_is_well(
        self, make_run: Callable[..., Run], place: str
    ) -> None:
        run = make_run(place=place, every=100)
        run.begin().until(4)
        run.begin().until(5)
        assert len(run.server.asked) == 1
        run.server.snapshot, run.server.version = None, 0
        run.begin().until(5)
        put = [request.path for request in run.server.site.requests if request.method == "PUT"]
        uploads = [path for path in put if "/weights/" in path]
        assert len(uploads) == len(set(uploads))


class TestRefusals:
    @pytest.mark.parametrize(
        ("on_server", "message"),
        [
            (None, r"reference\.sync_steps: .* start ref-server with `--snapshot-root .*snapshots`"),
            (Path("/nowhere"), r"does not find test/epoch-\S+ below its `--snapshot-root`; is .*snapshots the"),
        ],
    )
    def test_a_server_without_the_directory(
        self, make_run: Callable[..., Run], on_server: Path | None, message: str
    ) -> None:
        run = make_run()
        run.server.root = on_server
        with pytest.raises(UserError, match=message):
            run.begin().until(0)

    def test_too_small_a_role(self, make_run: Callable[..., Run]) -> None:
        """Nothing is due: without a check the run would go on until the next renewal."""
        run = make_run(every=100)
        run.begin().until(3)
        run.server.errors = [(403, "forbidden")]
        with pytest.raises(UserError, match=r"reference\.sync_steps: .* 403: it is forbidden"):
            run.begin()
        assert len(run.server.asked) == 1, "the check replaces nothing"

    def test_a_checkpoint_whose_reference_is_gone(self, make_run: Callable[..., Run]) -> None:
        run = make_run()
        run.begin().until(3)
        (run.root / "test").rename(run.root / "elsewhere")
        run.server.restart()
        with pytest.raises(UserError, match="the reference of this run, test/epoch-0000-version-00000002, is missing"):
            run.begin().until(3)
        (run.root / "elsewhere").rename(run.root / "test")
        run.begin().until(5)

    def test_a_reference_without_a_root(self, make_run: Callable[..., Run]) -> None:
        run = make_run()
        run.begin().until(3)
        with pytest.raises(UserError, match=r"reference\.snapshot_root: .* test/epoch-0000-version-00000002; give the"):
            run.begin().choose(ReferenceConfig())


class TestOtherSettings:
    def test_without_renewal_the_server_is_not_asked(self, make_run: Callable[..., Run]) -> None:
        run = make_run()
        life = run.begin()
        run.server.site.requests.clear()  # that life's settings renew
        assert life.choose(ReferenceConfig()) is None
        assert run.server.site.requests == []

    def test_a_run_that_goes_on_without_keeps_what_it_had(self, make_run: Callable[..., Run]) -> None:
        run = make_run()
        run.begin().until(3)
        run.server.restart()
        life = run.begin()
        renewal = life.choose(ReferenceConfig(snapshot_root=run.root))
        for step in range(3, 9):
            life.state.step = step
            renewal.ensure()
        assert (run.server.snapshot, run.server.version) == ("test/epoch-0000-version-00000002", 2)

    def test_a_run_that_goes_on_with_it_begins_with_the_policy_there(self, make_run: Callable[..., Run]) -> None:
        run = make_run()
        life = run.begin()
        for _ in range(5):
            life.update()
        life.save()
        life = run.begin()
        life.renewal.ensure()
        assert life.state.renewed_at == 5
        for name, weight in run.server.weights.items():
            torch.testing.assert_close(weight, run.policy(5)[name], rtol=0, atol=1e-6)

    def test_an_average_that_comes_later_begins_with_the_reference(self, make_run: Callable[..., Run]) -> None:
        run = make_run()
        run.begin().until(3)
        before = run.reference(3)
        run.decay = 0.75
        life = run.begin()
        life.renewal.ensure()
        life.update()
        life.renewal.ensure()
        for name, weight in life.renewal.average.items():
            expected = 0.75 * before[name] + 0.25 * run.policy(4)[name].double()
            torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6)

    def test_the_same_step_saved_on_both_sides_of_a_renewal(self, make_run: Callable[..., Run]) -> None:
        """A stop is requested just after the renewal: the average goes with the reference."""
        run = make_run(decay=0.5, every=3)
        life = run.begin().until(3)
        assert read_state(life.checkpoints.newest() or Path()).renewed_at == 0
        life.save()
        again = run.begin()
        assert again.state.renewed_at == 3
        assert all(torch.equal(weight, life.renewal.average[name]) for name, weight in again.renewal.average.items())
        again.until(7)


class TestRemoval:
    def test_what_server_and_checkpoints_need_stays(self, make_run: Callable[..., Run]) -> None:
        run = make_run(keep=1)
        other = run.root / "other" / "epoch-0000-version-00000001"
        other.mkdir(parents=True)
        (run.root / "test" / "mine").mkdir(parents=True)
        life = run.begin().until(8)
        references = sorted({life.state.reference, *life.checkpoints.references()} - {None}, key=str)
        assert references == [f"test/epoch-0000-version-0000000{n}" for n in (3, 5)]
        assert snapshots(run) == [*references, "test/mine"]
        assert_kept(life)
        assert other.exists()

    def test_a_directory_that_must_not_be_cleaned(
        self, make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path, ignore_errors: bool = False) -> None:
            if not ignore_errors:
                raise PermissionError(f"{path} is read-only")

        monkeypatch.setattr("shared.atomic_files.shutil.rmtree", refuse)
        run = make_run(keep=9)
        run.begin().until(2)
        assert "old snapshots are not removed" in run.notes[-1]
        run.begin().until(5)

    def test_a_new_run_of_that_name_uses_no_name_again(self, make_run: Callable[..., Run], tmp_path: Path) -> None:
        """The directory of the run was deleted, the server restarted, and the snapshots are still there."""
        run = make_run()
        run.begin().until(4)
        run.server.restart()
        again = make_run(directory=tmp_path / "again")
        again.begin().until(3)
        assert [version for _, version in again.server.asked] == [1, 2, 3, 4, 5]
