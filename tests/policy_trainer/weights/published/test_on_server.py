"""Weights that meet on a real reference server: a trainer uploads them, workers without its directory read them."""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import RolloutConfig, TrainConfig
from policy_trainer.config.worker_settings import worker_settings
from policy_trainer.data.completion import Probe
from policy_trainer.learner.adapters import save_policy
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.run import open_run
from policy_trainer.weights.published.download import DownloadedWeights
from policy_trainer.weights.published.publication import Publication, Save
from policy_trainer.weights.published.publisher import UploadedWeights
from ref_server.service.service import Service
from shared.client import NotRefServer, RefServerClient, RefServerError
from shared.errors import UserError
from shared.models import copy_state, load_model, load_tokenizer
from tests.harness.processes import until
from tests.ref_server.conftest import make_service, model, serve

__all__ = ["make_service", "model", "serve"]

RUNS = count()
EMPTY = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy_trainer.weights.published.download._POLL_SECONDS", 0.2)


@pytest.fixture(scope="module")
def service(make_service: Callable[..., Service]) -> Service:
    return make_service()


@pytest.fixture(scope="module")
def url(service: Service, serve: Callable[[Service], AbstractContextManager[httpx.Client]]) -> Iterator[str]:
    with serve(service) as http:
        yield str(http.base_url)


@pytest.fixture
def client(url: str) -> Iterator[RefServerClient]:
    with RefServerClient(url) as made:
        yield made


@pytest.fixture
def first() -> Publication:
    """Of a run of the test's own."""
    return Publication(f"run-{next(RUNS)}", 0, 1, next_index=3, max_waiting=12, lineage="first")


@pytest.fixture
def publisher(client: RefServerClient, tmp_path: Path) -> UploadedWeights:
    return UploadedWeights(client, tmp_path / "run" / "weights", {"seed": 5})


@pytest.fixture
def copies(make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast) -> Callable[[float], Save]:
    """A model whose weights are all one number."""
    tiny = make_tiny()

    def make(value: float) -> Save:
        with torch.no_grad():
            for parameter in tiny.parameters():
                parameter.fill_(value)
        return partial(save_policy, tiny, tokenizer, state=copy_state(tiny))

    return make


@pytest.fixture
def reader(url: str, first: Publication, tmp_path: Path) -> Iterator[DownloadedWeights]:
    with closing(DownloadedWeights(RefServerClient(url), first.run, tmp_path / "worker")) as made:
        yield made


def value_of(directory: Path) -> float:
    """The number that all weights of a model directory are."""
    load_tokenizer(str(directory))
    loaded = load_model(str(directory), revision=None, device="cpu", dtype="float32")
    (value,) = torch.cat([parameter.flatten() for parameter in loaded.parameters()]).unique().tolist()
    return value


def test_a_worker_gets_each_version_and_the_end(
    publisher: UploadedWeights, reader: DownloadedWeights, copies: Any, first: Publication, tmp_path: Path
) -> None:
    assert reader.newest() is None
    probe = Probe([1], [[2, 3]], [-0.5, -1.0])
    for version in (1, 2, 3, 4):
        published = replace(first, version=version, probe=probe)
        publisher.publish(copies(float(version)), published)
        until(lambda published=published: reader.newest() == published)
        with reader.reading(published, "0-of-1") as directory:
            assert value_of(directory) == version
    assert sorted(path.name for path in (tmp_path / "worker/first").iterdir()) == ["0000-00000003", "0000-00000004"]
    assert [path.name for path in (tmp_path / "run/weights").iterdir()] == ["latest.json"]  # nothing else is left
    publisher.publish(copies(9.0), replace(published, finished=True))
    until(lambda: (newest := reader.newest()) is not None and newest.finished)
    with reader.reading(published, "0-of-1") as directory:
        assert value_of(directory) == 4.0  # the end is no new version


def test_what_is_read_stays(
    publisher: UploadedWeights, reader: DownloadedWeights, copies: Any, first: Publication
) -> None:
    publisher.publish(copies(1.0), first)
    until(lambda: reader.newest() == first)
    with reader.reading(first, "0-of-1") as directory:
        for version in (2, 3, 4):
            newer = replace(first, version=version)
            publisher.publish(copies(float(version)), newer)
            until(lambda newer=newer: reader.newest() == newer)
        assert value_of(directory) == 1.0
    publisher.publish(copies(5.0), replace(first, version=5))
    until(lambda: not directory.exists())
    with pytest.raises(FileNotFoundError, match="newer"), reader.reading(first, "0-of-1"):
        pass


def test_what_a_killed_worker_left_of_another_training_goes(
    publisher: UploadedWeights, reader: DownloadedWeights, copies: Any, first: Publication, tmp_path: Path
) -> None:
    for name in (".tmp-0000-00000007", ".removed-0000-00000006", "0000-00000006"):
        (tmp_path / "worker" / "earlier" / name).mkdir(parents=True)
    publisher.publish(copies(1.0), first)
    until(lambda: reader.newest() == first)
    until(lambda: [path.name for path in (tmp_path / "worker" / "earlier").iterdir()] == ["0000-00000006"])


def test_another_training_of_the_name_is_found(
    client: RefServerClient, publisher: UploadedWeights, reader: DownloadedWeights, copies: Any, first: Publication,
    tmp_path: Path,
) -> None:  # fmt: skip
    publisher.publish(copies(1.0), replace(first, version=8))
    until(lambda: reader.newest() is not None)
    other = replace(first, lineage="second", version=0)
    UploadedWeights(client, tmp_path / "other", {}).publish(copies(2.0), other)
    until(lambda: reader.newest() == other)


def test_a_restarted_worker_downloads_nothing_again(
    url: str, publisher: UploadedWeights, reader: DownloadedWeights, copies: Any, first: Publication, tmp_path: Path
) -> None:
    publisher.publish(copies(1.0), first)
    until(lambda: reader.newest() == first)
    (file,) = (tmp_path / "worker").rglob("model.safetensors")
    before = file.stat().st_ino
    with closing(DownloadedWeights(RefServerClient(url), first.run, tmp_path / "worker")) as again:
        until(lambda: again.newest() == first)
    assert file.stat().st_ino == before


def test_what_keeps_weights_from_coming_is_raised(url: str, tmp_path: Path, open_site: Any) -> None:
    error = {"error": {"code": "forbidden", "message": "no"}}
    site = open_site(lambda _: site.answer(403, json.dumps(error).encode()))
    with (
        closing(DownloadedWeights(RefServerClient(site.url), "run", tmp_path)) as reader,
        pytest.raises(RefServerError, match="403"),
    ):
        until(lambda: reader.newest() is not None)


def test_the_end_of_a_run_ends_the_looking(
    publisher: UploadedWeights, reader: DownloadedWeights, copies: Any, first: Publication
) -> None:
    others = set(threading.enumerate())
    publisher.publish(copies(1.0), replace(first, finished=True))
    until(lambda: (newest := reader.newest()) is not None and newest.finished)
    until(lambda: not any(thread.name == "weights" for thread in set(threading.enumerate()) - others))


def test_a_server_that_hangs_keeps_no_worker(tmp_path: Path, open_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy_trainer.weights.published.download._ENDING_SECONDS", 0.05)
    requested, answer = threading.Event(), threading.Event()

    def hang(request: Any) -> None:
        requested.set()
        assert answer.wait(60)

    reader = DownloadedWeights(RefServerClient(open_site(hang).url), "run", tmp_path)
    assert reader.newest() is None
    assert requested.wait(60)
    reader.close()
    assert not answer.is_set()
    answer.set()


class TestHostileVersions:
    """What the server answers, and what lies behind it, may be anybody's who may publish weights."""

    @pytest.fixture
    def answer(self, open_site: Any) -> Callable[..., RefServerClient]:
        """A client of a server that has this version, whose files are all empty."""

        def make(files: dict[str, Any] | None = None, **fields: Any) -> RefServerClient:
            named = dict.fromkeys(("model.safetensors", "config.json"), EMPTY)
            body = {"run": "r", "lineage": "l", "epoch": 0, "version": 1, "next_index": 0, "max_waiting": 4, **fields}
            newest = json.dumps({**body, "files": named if files is None else files}).encode()

            def respond(request: Any) -> Any:
                return site.answer(200, newest if request.path.partition("?")[0].endswith("/r") else b"")

            site = open_site(respond)
            return RefServerClient(site.url)

        return make

    def downloaded(self, client: RefServerClient, directory: Path) -> Publication:
        with closing(DownloadedWeights(client, "r", directory)) as reader:
            until(lambda: reader.newest() is not None)
            newest = reader.newest()
        assert newest is not None
        return newest

    @pytest.mark.parametrize(
        "fields",
        [
            *({"files": {name: EMPTY}} for name in ("../up.json", "/x.json", ".hidden.json", "", "a\\..\\b\0.json")),
            *({"lineage": name} for name in ("../../up", "/tmp", "")),
            {"epoch": -1},
            {"version": 10**30},
        ],
    )
    def test_no_name_leads_out_of_the_directory(self, answer: Any, tmp_path: Path, fields: dict[str, Any]) -> None:
        with pytest.raises(NotRefServer, match="WeightsVersion"):
            self.downloaded(answer(**fields), tmp_path / "worker")
        assert not list(tmp_path.rglob("*.json"))

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "modeling_evil.py", "weights.pt", "vocab.pkl", "x.so"])
    def test_neither_pickle_nor_code_is_downloaded(self, answer: Any, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserError, match=f"weights: .*{name}.*safetensors"):
            self.downloaded(answer({name: EMPTY}), tmp_path)
        assert not list(tmp_path.rglob(name))

    def test_more_than_the_disk_holds_is_not_begun(self, answer: Any, tmp_path: Path) -> None:
        files = {"model.safetensors": {"bytes": 10 * 2**40, "sha256": "0" * 64}}
        with pytest.raises(RunFailed, match=r"version 0\.1 .* 10,485,760 MiB"):
            self.downloaded(answer(files), tmp_path)

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            ({"weight_map": {"a": "/home/other/model.safetensors"}}, "names '/home/other/model.safetensors'"),
            ({"weight_map": ["a"]}, "no index"),
            ([], "no index"),
        ],
    )
    def test_an_index_names_files_of_its_version(
        self, publisher: UploadedWeights, reader: DownloadedWeights, copies: Any, first: Publication, index: Any,
        message: str,
    ) -> None:  # fmt: skip
        def save(directory: Path) -> None:
            copies(1.0)(directory)
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))

        publisher.publish(save, first)
        with pytest.raises(UserError, match=message):
            until(lambda: reader.newest() is not None)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("next_index", -1), ("next_index", "x"), ("next_index", 10**40), ("max_waiting", None), ("finished", [1]),
            ("probe", {"prompt_ids": [1], "completions": [[1, 2]], "logps": [0.5]}),
            ("probe", {"prompt_ids": [-1], "completions": [[1]], "logps": [0.5]}),
            ("probe", {"prompt_ids": [1], "completions": [[]], "logps": []}), ("probe", 7),
        ],
    )  # fmt: skip
    def test_its_description_is_checked(self, answer: Any, tmp_path: Path, field: str, value: Any) -> None:
        with pytest.raises(UserError, match=f"weights: the published {field}"):
            self.downloaded(answer(**{field: value}), tmp_path)
        assert not list(tmp_path.rglob("*.json"))  # before it is downloaded


@pytest.mark.parametrize("finished", [False, True])
def test_files_that_the_server_lost_are_uploaded_again(
    service: Service, publisher: UploadedWeights, client: RefServerClient, copies: Any, first: Publication,
    finished: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before the commit, or, at the end of a run, since an earlier one."""
    if finished:
        publisher.publish(copies(1.0), first)
    weights = service.config.data_dir / "weights"
    commit, commits = client.commit_weights, []

    def lose_once(*arguments: Any) -> Any:
        commits.append(arguments)
        if len(commits) == 1:
            shutil.rmtree(weights / first.run, ignore_errors=True)
            shutil.rmtree(weights / ".staging" / first.run)
        return commit(*arguments)

    monkeypatch.setattr(client, "commit_weights", lose_once)
    publisher.publish(copies(2.0), replace(first, finished=finished))
    newest = client.newest_weights(first.run)
    assert newest is not None and (newest.words["finished"], len(commits)) == (finished, 2)


def test_a_resumed_run_begins_a_later_epoch(
    publisher: UploadedWeights, copies: Any, first: Publication, tmp_path: Path
) -> None:
    """Its earlier life may have published versions after its last checkpoint."""
    publisher.publish(copies(1.0), replace(first, epoch=6))
    config = TrainConfig(model="m", run_dir=tmp_path / "run", max_steps=2, weights="server")
    assert open_run(config, Console(quiet=True)).state.epoch == 7


Start = Callable[..., RolloutConfig]


class TestSettings:
    """A worker that is started with the server's URL and a run gets its settings from the published weights."""

    @pytest.fixture
    def trained(self, tmp_path: Path) -> Callable[..., dict[str, Any]]:
        """The settings that a trainer publishes."""

        def make(**settings: Any) -> dict[str, Any]:
            basic: dict[str, Any] = {"model": "secret/path", "run_dir": tmp_path, "seed": 7, "rewards": ["accuracy"]}
            return worker_settings(
                TrainConfig.model_validate({**basic, "sampling": {"num_generations": 5}, **settings})
            )

        return make

    @pytest.fixture
    def start(self, client: RefServerClient, copies: Any, first: Publication, tmp_path: Path) -> Start:
        """Publishes settings, unless they are None, and reads those of a worker with these options."""

        def make(settings: Any, *options: str, run: str = first.run) -> RolloutConfig:
            if settings is not None:
                UploadedWeights(client, tmp_path / "weights", settings).publish(copies(3.0), replace(first, run=run))
            arguments = ["--server", client.url, "--run", run, "--run-dir", str(tmp_path / "w"), *options]
            return read_settings(RolloutConfig, arguments, "rollout")

        return make

    def test_a_worker_needs_the_url_and_the_run_alone(
        self, start: Start, trained: Any, client: RefServerClient, first: Publication, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        config = start(trained(loss={"advantage": "gdpo"}), "--sampling.temperature", "0.5")
        assert (config.seed, config.rewards, config.sampling.num_generations) == (7, ["accuracy"], 5)
        assert config.sampling.temperature == 0.5  # the command line wins
        assert config.loss.advantage == "gdpo"
        assert (config.device, config.weights) == ("auto", "server")
        assert value_of(Path(config.model)) == 3.0
        assert RunDirectory(tmp_path / "w").workers in Path(config.model).parents
        monkeypatch.chdir(tmp_path)
        config = read_settings(RolloutConfig, ["--server", client.url, "--run", first.run], "rollout")
        assert config.run_dir == Path("runs", first.run)
        assert config.run_dir / "workers" in Path(config.model).parents

    def test_settings_are_checked_as_ever(self, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            start({"sampling": {"temperature": "hot"}})
        assert ended.value.code == 2
        assert "sampling" in capsys.readouterr().err

    def test_a_worker_takes_no_others(self, start: Start, client: RefServerClient, tmp_path: Path) -> None:
        settings = {"token_file": "/etc/passwd", "run_dir": "/elsewhere", "server": "http://evil", "model": "evil"}
        config = start(settings)
        assert (config.token_file, config.run_dir, config.server) == (None, tmp_path / "w", client.url)
        assert value_of(Path(config.model)) == 3.0

    def test_a_worker_of_adapters_takes_the_model_that_they_are_for(
        self, start: Start, trained: Any, first: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        (tmp_path / "base").mkdir()
        monkeypatch.chdir(tmp_path)
        for base, taken in (("some/model", "some/model"), ("base", str(tmp_path / "base"))):
            settings = trained(model=base, revision="v1", lora={"rank": 5})
            config = start(settings, "--trust-settings", run=f"{first.run}-{base[:4]}")
            assert (config.model, config.revision, config.lora.rank, config.weights) == (taken, "v1", 5, "server")
        (tmp_path / "base").rename(tmp_path / "here")
        with pytest.raises(SystemExit):
            start(settings, "--trust-settings")
        pattern = r"model: run .* trains adapters of .*/base, .* give --model .*, and --weights server"
        assert re.search(pattern, capsys.readouterr().err)
        given = ["--model", str(tmp_path / "here"), "--weights", "server", "--revision", "v2"]
        assert start(None, *given).model == str(tmp_path / "here")

    def test_each_refused_setting_is_named_with_its_option(
        self, start: Start, trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        settings = trained(
            model="some/model", lora={"rank": 2}, task="mixture", rewards=["accuracy", "os:system\x1b[2J"],
            data={"mixture": [{"task": "gsm8k"}, {"task": "jsonl", "path": "/of/the/trainer"}]},
        )  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            start(settings)
        message = capsys.readouterr().err
        assert ended.value.code == 2 and "\x1b" not in message
        for line in (
            'model = "some/model": give --model and --weights server',
            'rewards = ["accuracy", "os:system\\u001b[2J"]: give --rewards',
            'data.mixture.1.path = "/of/the/trainer": give --data.mixture',
            "--trust-settings",
        ):
            assert line in message
        assert not list((tmp_path / "w").rglob("*.safetensors"))
        problems = tmp_path / "problems.jsonl"
        problems.write_text('{"prompt": "?", "answer": "1"}\n')
        mixture = json.dumps([{"task": "jsonl", "path": str(problems)}])
        given = ["--model", "mine", "--weights", "server", "--rewards", "accuracy", "--data.mixture", mixture]
        config = start(None, *given)
        assert (config.model, config.rewards, config.seed) == ("mine", ["accuracy"], 7)
        assert [source.path for source in config.data.mixture] == [problems]

    @pytest.mark.parametrize("rest", [{}, {"later": {"a\x1bb": None}, "data": {"new.one": None}}])
    def test_what_a_newer_trainer_publishes_is_left_out_and_reported(
        self, start: Start, capsys: pytest.CaptureFixture[str], rest: dict[str, Any]
    ) -> None:
        assert start({"seed": 5, **rest}).seed == 5
        message = capsys.readouterr().err
        assert ('does not have: ["later", "data.new.one"]' in message) == bool(rest)
        assert "\x1b" not in message

    def test_it_waits_for_the_trainer(
        self, start: Start, client: RefServerClient, copies: Any, first: Publication, tmp_path: Path
    ) -> None:
        publisher = UploadedWeights(client, tmp_path / "weights", {"seed": 5})
        publish = threading.Timer(0.3, publisher.publish, (copies(3.0), first))
        publish.start()
        assert start(None).seed == 5
        publish.join()
