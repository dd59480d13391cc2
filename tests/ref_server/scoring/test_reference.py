"""PUT /v1/reference: other weights for a running server, and refusals."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from policy_trainer.cli.demo.base_model import make_tokenizer
from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.scoring import frozen_model
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared import wire
from shared.api import WeightsName
from shared.batch import Batch
from shared.logprobs import choose_forward
from shared.models import save_model
from tests.ref_server.calls import SAFETENSORS, Rollout, Serve, admit, error
from tests.ref_server.scoring.changed_models import randomly_changed_model as other_model
from tests.ref_server.scoring.queued import lease_scored, ref_logps, scored
from tests.rounding import rounding

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("snapshots")
    save_model(other_model(), make_tokenizer(), directory / "run" / "step-1")
    return directory


@pytest.fixture(scope="module")
def serve_below(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, serve: Serve
) -> Callable[[Path | None], AbstractContextManager[Any]]:
    """Serves a reference that was loaded as the command loads it."""

    def below(root: Path | None) -> AbstractContextManager[Any]:
        config = ServeConfig(model=str(model_dir), data_dir=tmp_path_factory.mktemp("data"), snapshot_root=root)
        return serve(Service(frozen_model.load(config), open_queue(config), config))

    return below


@pytest.fixture(scope="module")
def served(root: Path, serve_below: Any) -> Iterator[httpx.Client]:
    """A server whose reference no test replaces."""
    with serve_below(root) as http:
        yield http


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshot root of `refusing`."""
    return tmp_path_factory.mktemp("spoilt") / "root"


@pytest.fixture(scope="module")
def refusing(spoilt: Path, serve_below: Any) -> Iterator[httpx.Client]:
    """A server that gets only bad snapshots."""
    with serve_below(spoilt) as http:
        yield http


def put(http: httpx.Client, snapshot: str, version: int) -> httpx.Response:
    return http.put("/v1/reference", json={"snapshot": snapshot, "version": version})


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, error(answer, answer.status_code)["code"]


def score(http: httpx.Client, batch: Batch) -> Batch:
    return scored(http.post("/v1/logprobs", content=wire.encode(batch), headers=SAFETENSORS).content)


def publish(http: httpx.Client, directory: Path, version: int) -> str:
    """Uploads a model as published weights; returns the name of the snapshot."""
    name, files = WeightsName("run", "first", 0, version).snapshot, {}
    for file in directory.iterdir():
        stored = http.put(f"/v1/{name}/{file.name}", content=file.read_bytes(), headers={"Content-Type": "any/thing"})
        files[file.name] = stored.json()
    assert http.post(f"/v1/{name}/commit", json={"files": files}).status_code == 200
    return name


def test_published_weights_need_no_root(
    tmp_path: Path, serve_below: Any, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.weights.store.PAUSE_SECONDS", 0.0)
    batch = rollout(lengths=(3, 5), temperature=0.9)
    expected = choose_forward(other_model())([batch.group], [0.9]).detach().numpy()
    save_model(other_model(), make_tokenizer(), tmp_path / "other")
    with serve_below(None) as http:
        published = publish(http, tmp_path / "other", 1)
        assert put(http, published, 1).json() == {"reference_version": 1}
        assert score(http, batch).ref_logps == pytest.approx(expected, abs=rounding(16))
        for version in (2, 3, 4):
            publish(http, tmp_path / "other", version)
        assert http.get(f"/v1/{published}").status_code == 200  # a restarted server will want it again
        assert http.get("/v1/weights/run/first/0/2").status_code == 410
        assert refusal(put(http, "weights/run/first/0/2", 2)) == (404, "not_found")
        assert refusal(put(http, "weights/.staging/first/0/2", 2)) == (422, "invalid_request")
        answer = put(http, "weights/run", 2)
        assert refusal(answer) == (409, "no_snapshot_root")
        assert "--snapshot-root" in answer.json()["error"]["message"]


def test_other_weights_score_later_requests(root: Path, serve_below: Any, rollout: Rollout) -> None:
    batch = rollout(lengths=(3, 5), temperature=0.9)
    expected = choose_forward(other_model())([batch.group], [0.9]).detach().numpy()
    with serve_below(root) as http:
        before = score(http, batch)
        answer = put(http, "run/step-1", 3)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"reference_version": 3}
        after = score(http, batch)
        assert (before.reference_version, after.reference_version) == ("0", "3")
        np.testing.assert_allclose(ref_logps(after), expected, atol=rounding(16))
        assert np.abs(ref_logps(after) - ref_logps(before)).max() > 0.01
        by_ids = {"prompt_ids": [1], "completions": [[2]]}
        assert http.post("/v1/logprobs", json=by_ids).json()["reference_version"] == 3
        model = http.get("/v1/model").json()
        assert (model["reference_version"], model["snapshot"]) == (3, "run/step-1")
        admit(http, batch)
        queued = lease_scored(http)
        assert queued.reference_version == "3"
        np.testing.assert_allclose(ref_logps(queued), expected, atol=rounding(16))

        assert put(http, "run/step-1", 3).status_code == 200, "a repeated request is harmless"
        assert refusal(put(http, "run/step-1", 2)) == (409, "older_version")
        (root / "again").symlink_to(root / "run" / "step-1")
        assert refusal(put(http, "again", 3)) == (409, "older_version")
        assert put(http, "again", 4).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["/etc", "../run", "run/..", "run/../run/step-1", ".hidden", "run/.step", "run//step-1", "run/", "a b", "ü", "a\n"],
)
def test_bad_names_of_snapshots(served: httpx.Client, name: str) -> None:
    answer = put(served, name, 1)
    assert refusal(answer) == (422, "invalid_request")
    assert answer.json()["error"]["field"] == "snapshot"


def changed_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def changed_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(directory / WEIGHTS)
    change(weights)
    save_file(weights, directory / WEIGHTS, {"format": "pt"})


def first_of(weights: dict[str, Tensor]) -> str:
    return next(name for name in sorted(weights) if "layers" in name and weights[name].dim() == 2)


def outside(directory: Path) -> Path:
    made = directory.parents[1] / "outside" / directory.name
    made.mkdir(parents=True, exist_ok=True)
    return made


def link_weights(directory: Path) -> None:
    target = outside(directory) / WEIGHTS
    (directory / WEIGHTS).rename(target)
    (directory / WEIGHTS).symlink_to(target)


def index_of(directory: Path, file: object) -> None:
    names = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).rename(outside(directory) / WEIGHTS)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def pickled(directory: Path) -> None:
    weights = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    torch.save(weights, directory / "pytorch_model.bin")


def other_tokenizer(directory: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(directory)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another kind": (lambda d: changed_config(d, model_type="gpt2"), "other_architecture"),
    "another shape": (lambda d: changed_config(d, intermediate_size=96), "other_architecture"),
    "another tokenizer": (other_tokenizer, "other_architecture"),
    "missing weights": (
        lambda d: changed_weights(d, lambda weights: weights.pop(first_of(weights))),
        "other_architecture",
    ),
    "superfluous weights": (
        lambda d: changed_weights(d, lambda weights: weights.update({"model.extra": torch.ones(2)})),
        "other_architecture",
    ),
    "other shapes": (
        lambda d: changed_weights(d, lambda weights: weights.update({first_of(weights): torch.ones(3, 3)})),
        "bad_snapshot",
    ),
    "not a number": (
        lambda d: changed_weights(d, lambda weights: weights[first_of(weights)].fill_(torch.nan)),
        "bad_snapshot",
    ),
    "cut off": (lambda d: os.truncate(d / WEIGHTS, 5000), "bad_snapshot"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "bad_snapshot"),
    "pickled weights": (pickled, "bad_snapshot"),
    "config that is none": (lambda d: (d / "config.json").write_text("[]"), "bad_snapshot"),
    "weights outside": (link_weights, "unsafe_snapshot"),
    "index that leads outside": (lambda d: index_of(d, f"../../outside/{d.name}/{WEIGHTS}"), "unsafe_snapshot"),
    "index of numbers": (lambda d: index_of(d, 1), "unsafe_snapshot"),
    "index that is none": (lambda d: (d / f"{WEIGHTS}.index.json").write_text("[]"), "bad_snapshot"),
    "an adapter": (lambda d: (d / "adapter_config.json").write_text("{}"), "unsafe_snapshot"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_bad_snapshots(root: Path, spoilt: Path, refusing: httpx.Client, rollout: Rollout, fault: str) -> None:
    spoil, code = REFUSED[fault]
    name, batch = fault.replace(" ", "-"), rollout()
    spoil(shutil.copytree(root / "run" / "step-1", spoilt / name))
    before = score(refusing, batch)
    answer = put(refusing, name, 1)
    assert refusal(answer) == (409, code), answer.text
    after = score(refusing, batch)
    assert after.reference_version == "0"
    np.testing.assert_array_equal(after.ref_logps, before.ref_logps)
    assert refusing.get("/v1/model").json()["snapshot"] is None
    assert refusing.get("/readyz").status_code == 200


def test_a_link_to_itself_does_no_harm(root: Path, tmp_path: Path, serve_below: Any) -> None:
    loop = shutil.copytree(root / "run" / "step-1", tmp_path / "x") / "loop"
    loop.symlink_to(loop)
    with serve_below(tmp_path) as http:
        assert put(http, "x", 1).status_code == 200


def test_a_snapshot_chooses_no_attention(tmp_path: Path, serve_below: Any, rollout: Rollout) -> None:
    save_model(other_model(), make_tokenizer(), tmp_path / "root" / "x")
    changed_config(tmp_path / "root" / "x", attn_implementation="anybody/attention")
    batch = rollout(lengths=(3, 5))
    expected = choose_forward(other_model())([batch.group], [1.0]).detach().numpy()
    with serve_below(tmp_path / "root") as http:
        answer = put(http, "x", 1)
        assert answer.status_code == 200, answer.text
        np.testing.assert_allclose(ref_logps(score(http, batch)), expected, atol=rounding(16))


def test_missing_snapshots(root: Path, tmp_path: Path, served: httpx.Client, serve_below: Any) -> None:
    (root / "empty").mkdir()
    (root / "elsewhere").symlink_to(tmp_path)
    for name in ("nothing", "run/step-9", "empty", "elsewhere", "run"):
        answer = put(served, name, 1)
        assert refusal(answer) == (404, "not_found")
        assert answer.json()["error"]["field"] == "snapshot"
    with serve_below(root / "nowhere") as http:
        assert refusal(put(http, "run/step-1", 1)) == (404, "not_found")


def test_a_server_without_a_model_has_no_reference_to_replace(root: Path, tmp_path: Path, serve: Serve) -> None:
    config = ServeConfig(no_model=True, data_dir=tmp_path, snapshot_root=root)
    with serve(Service(NoReferenceModel(config), open_queue(config), config)) as http:
        assert refusal(put(http, "run/step-1", 1)) == (409, "no_model")


def test_weights_in_several_files(tmp_path: Path, serve_below: Any, rollout: Rollout) -> None:
    save_model(other_model(), make_tokenizer(), tmp_path / "sharded")
    (tmp_path / "sharded" / WEIGHTS).unlink()
    other_model().save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded" / f"{WEIGHTS}.index.json").exists()
    batch = rollout()
    with serve_below(tmp_path) as http:
        assert put(http, "sharded", 1).status_code == 200
        expected = choose_forward(other_model())([batch.group], [1.0]).detach().numpy()
        np.testing.assert_allclose(ref_logps(score(http, batch)), expected, atol=rounding(16))
