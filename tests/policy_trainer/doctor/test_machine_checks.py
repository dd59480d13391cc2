"""Versions outside of the ranges, a device that is not there, a memory that is too small."""

from pathlib import Path

import pytest
from transformers import Qwen2Config

from policy_trainer.doctor import setup_checks as machine_checks
from policy_trainer.doctor.findings import Verdict
from policy_trainer.doctor.setup_checks import devices, memory, versions
from shared.errors import UserError
from tests.policy_trainer.doctor.subjects import looked, verdicts


def test_versions_that_fit_are_named(model: Path) -> None:
    [finding] = looked(versions, model)
    assert finding.verdict is Verdict.OK
    assert "torch 2." in finding.seen and "transformers " in finding.seen and "Python 3." in finding.seen


def test_versions_that_do_not_fit_are_wrong(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=999", "no-such-library>=1", "rich>=14", "vllm>=999; extra == 'vllm'"]
    monkeypatch.setattr(machine_checks, "requires", lambda name: needed)
    findings = looked(versions, model)
    assert verdicts(findings) == [Verdict.WRONG, Verdict.WRONG]
    assert findings[0].seen.startswith("numpy ") and findings[0].remedy == "pip install 'numpy>=999'"
    assert "no-such-library is not installed" in findings[1].seen


def test_a_device_that_is_not_there(model: Path) -> None:
    with pytest.raises(UserError, match=r"^device: there is no cuda:77 here"):
        looked(devices, model, device="cuda:77")
    with pytest.raises(UserError, match=r"^device: there is no cuda:77 here"):
        looked(devices, model, reference={"device": "cuda:77"})
    assert verdicts(looked(devices, model, reference={"device": "cuda:77"}, server="http://gpu:8400")) == [Verdict.OK]


def test_a_driver_without_a_pytorch_for_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(machine_checks, "_DRIVER", driver)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    findings = looked(devices, model)
    assert verdicts(findings) == [Verdict.WARNING, Verdict.OK]
    assert "finds no GPU" in findings[0].seen and "install PyTorch" in findings[0].remedy


def test_a_model_that_is_too_large(tmp_path: Path) -> None:
    large = Qwen2Config(hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64)
    large.save_pretrained(tmp_path / "large")
    [finding] = looked(memory, tmp_path / "large")
    assert finding.verdict is Verdict.WRONG and "main memory has" in finding.seen
    assert "--dtype bfloat16" in finding.remedy


def test_a_model_that_fits_beside_other_programs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"data": {"max_prompt_length": 32}}
    assert verdicts(looked(memory, model, **lengths)) == [Verdict.OK]
    monkeypatch.setattr(machine_checks, "_free", lambda place: 1000)
    [finding] = looked(memory, model, **lengths)
    assert finding.verdict is Verdict.WARNING and "0.0 of" in finding.seen
