"""`policy-trainer push`: a run's model and its card, in a directory and on a stand-in of the Hub by its client."""

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from policy_trainer.cli.push import run
from shared.errors import UserError
from shared.process import child_environment
from tests.harness.models import tiny_model
from tests.policy_trainer.reporting.report.runs import learning_run, make_run, step_record

TOKEN = "hf_0123456789"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a finished run, with a model."""
    made = learning_run(
        tmp_path / "sums",
        loss={"beta": 0.125},
        reference={"snapshot_root": str(tmp_path / "me/snapshots")},
        rewards=["http://judge.me:80/score", "accuracy"],
    )
    tiny_model(made)
    return made


def test_a_directory_has_the_model_and_its_card(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run([str(root), "--to", str(out)]) == 0 and capsys.readouterr().out.strip() == str(out)
    files = {file.name for file in (root / "model").iterdir()}
    assert {file.name for file in out.iterdir()} == {*files, "README.md", "curves.png"}
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0 and len(AutoTokenizer.from_pretrained(out))
    card = ModelCard.load(out / "README.md")
    data = card.data.to_dict()
    assert (data["base_model"], data["library_name"], data["model_name"]) == ("base/model", "transformers", "out")
    assert {"grpo", "tandem", "generated_from_trainer"} <= set(data["tags"])
    assert "base/model was trained with GRPO on the task arithmetic, with the rewards http://…, accuracy." in card.text
    assert "Accuracy on held-out problems went from 0.05 (95% interval 0.02 to 0.11, step 0) to 0.9" in card.text
    assert "| step | decoding | problems | accuracy | 95% from | to | reward |" in card.text
    assert "| 10 | greedy | 100 | 0.9 | 0.826 | 0.945 | 1.8 |" in card.text
    assert "[loss]\nbeta = 0.125" in card.text
    assert "http://…" in card.text and "judge.me" not in card.text
    assert 'snapshot_root = "snapshots"' in card.text and str(tmp_path) not in card.content, (
        "no directories of this machine"
    )
    with pytest.raises(UserError, match="out exists"):
        run([str(root), "--to", str(out)])
    assert "![Curves of the run](curves.png)" in card.text
    with Image.open(out / "curves.png") as picture:
        assert picture.format == "PNG" and picture.width == 3 * 504  # accuracy, reward, KL


def test_a_card_without_curves(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run with a single step, and without matplotlib, which is an extra."""
    single = make_run(tmp_path / "single", [step_record(1)])
    tiny_model(single)
    assert run([str(single), "--to", str(tmp_path / "a")]) == 0 and not capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run([str(root), "--to", str(tmp_path / "b")]) == 0 and "tandem-grpo[plot]" in capsys.readouterr().err
    for out in ("a", "b"):
        assert not (tmp_path / out / "curves.png").exists()
        assert "curves.png" not in (tmp_path / out / "README.md").read_text()


def test_a_model_of_this_machine_is_no_base_on_the_hub(tmp_path: Path) -> None:
    root = learning_run(tmp_path / "sums", model=str(tmp_path / "me/base"))
    tiny_model(root)
    run([str(root), "--to", str(tmp_path / "out")])
    card = ModelCard.load(tmp_path / "out/README.md")
    assert "base_model" not in card.data.to_dict() and "base was trained with GRPO" in card.text


def test_a_checkpoint_is_pushed_without_what_only_the_run_needs(root: Path, tmp_path: Path) -> None:
    step = tiny_model(root / "checkpoints").rename(root / "checkpoints/step-00000006")
    for name in ("trainer.json", "optimizer.pt", "README.md"):
        (step / name).write_text("{}")
    (step / "reference").mkdir()
    run([str(root), "--checkpoint", "6", "--to", str(tmp_path / "out")])
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert not names & {"trainer.json", "optimizer.pt", "reference"} and "model.safetensors" in names
    assert "This is the model after step 6." in (tmp_path / "out/README.md").read_text()


def test_what_cannot_be_pushed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="no token; run `hf auth login`, or set HF_TOKEN"):
        run([str(root), "--repo", "me/sums"])
    with pytest.raises(UserError, match=r"no checkpoint of step 3; its newest checkpoint is step-00000010; "):
        run([str(root), "--to", str(tmp_path / "out"), "--checkpoint", "3"])
    (root / "model/model.safetensors").unlink()
    with pytest.raises(UserError, match="written under torchrun; first `policy-trainer export --checkpoint"):
        run([str(root), "--to", str(tmp_path / "out")])
    with pytest.raises(UserError, match="contains no run"):
        run([str(tmp_path), "--to", str(tmp_path / "out")])
    with pytest.raises(UserError, match="there is no finished model; it has no checkpoint; finish the run"):
        run([str(make_run(tmp_path / "begun", [step_record(1)])), "--to", str(tmp_path / "out")])


@dataclass
class Hub:
    """What was uploaded: repositories with whether they are private, and their files by name."""

    url: str = ""
    repositories: dict[str, bool] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """As far as uploads use it: https://huggingface.co/docs/hub/api."""
    state = Hub()

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state.tokens.add(self.headers.get("Authorization", ""))
            path = self.path.split("?")[0]
            if path == "/api/repos/create":
                wanted = json.loads(body)
                owner = wanted.get("organization") or "me"
                if owner == "taken":
                    return self.send(403, {"error": "You don't have the rights to create a model under taken"})
                name = f"{owner}/{wanted['name']}"
                if name in state.repositories:
                    return self.send(409, {"error": "You already created it", "url": f"{state.url}/{name}"})
                state.repositories[name] = wanted.get("private") or wanted.get("visibility") == "private"
                return self.send(200, {"url": f"{state.url}/{name}", "name": name, "id": name})
            if path == "/api/validate-yaml":  # of the card
                return self.send(200, {"errors": [], "warnings": []})
            if "/preupload/" in path:
                names = [each["path"] for each in json.loads(body)["files"]]
                modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
                files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
                return self.send(200, {"files": files})
            if path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**each, "actions": {"upload": {"href": f"{state.url}/large/{each['oid']}", "header": {}}}}
                    for each in json.loads(body)["objects"]
                ]
                return self.send(200, {"transfer": "basic", "objects": objects})
            if "/commit/" in path:
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        state.files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        state.files[value["path"]] = state.large[value["oid"]]
                commit = {
                    "commitUrl": f"{state.url}/me/my-sums/commit/1",
                    "commitOid": "1" * 40,
                    "hookOutput": "",
                    "success": True,
                }
                return self.send(200, commit)
            return self.send(404, {"error": f"no route {path}"})

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert sha256(body).hexdigest() == self.path.rpartition("/")[2]
            state.large[self.path.rpartition("/")[2]] = body
            self.send(200, {})

        def do_GET(self) -> None:
            name = self.path.removeprefix("/api/models/")
            if name in state.repositories:
                return self.send(200, {"id": name, "private": state.repositories[name], "tags": [], "downloads": 0})
            return self.send(404, {"error": f"no route {self.path}"})

        def send(self, status: int, answer: Any) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def push(root: Path, hub: Hub, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "policy_trainer", "push", str(root), *options]
    settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        command, env=child_environment() | settings, cwd=Path(__file__).parents[3], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


def test_the_hub_gets_the_model(root: Path, hub: Hub) -> None:
    done = push(root, hub, "--repo", "me/my-sums", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.url}/me/my-sums/commit/1"
    assert hub.repositories == {"me/my-sums": True} and hub.tokens == {f"Bearer {TOKEN}"}
    card = hub.files.pop("README.md").decode()
    assert 'model="me/my-sums"' in card and "model_name: my-sums" in card
    assert "curves.png" in card and hub.files.pop("curves.png").startswith(b"\x89PNG")
    assert hub.files == {file.name: file.read_bytes() for file in (root / "model").iterdir()}


def test_what_was_to_be_private_is_not_made_public(root: Path, hub: Hub) -> None:
    hub.repositories["me/my-sums"] = False
    done = push(root, hub, "--repo", "me/my-sums", "--private")
    assert done.returncode == 2 and "repo: me/my-sums is public; make it private there" in done.stderr
    assert not hub.files and not hub.large
    assert push(root, hub, "--repo", "me/my-sums").returncode == 0 and "README.md" in hub.files


def test_a_repository_of_others_is_refused(root: Path, hub: Hub) -> None:
    done = push(root, hub, "--repo", "taken/sums")
    assert done.returncode == 2 and "repo: taken/sums does not accept the model" in done.stderr
    assert "don't have the rights" in done.stderr and "Traceback" not in done.stderr
    assert TOKEN not in done.stderr + done.stdout
