"""Half precision and gradient checkpointing through real processes, in a run that is resumed."""

import pytest
import safetensors.torch
import torch

from tests.integration.processes import Server, steps_of
from tests.integration.runs import QUICK, assert_trained_exactly_once, train

MIXED = (*QUICK, "--dtype", "bfloat16", "--gradient-checkpointing", "--checkpoint.save-total-limit", "3")


@pytest.mark.parametrize(
    "offload",
    [
        ("none", "none"),
        pytest.param(("cpu", "none"), marks=pytest.mark.long),
        pytest.param(("none", "cpu"), marks=pytest.mark.long),
    ],
)
def test_a_bfloat16_run_keeps_its_float32_masters_over_a_resume(base_model, tmp_path, start, offload):
    """Wherever they lie in its two lives."""
    server = start(Server(base_model, tmp_path, None, "--dtype", "bfloat16"))
    run_dir = tmp_path / "mixed"
    for steps, where in zip(("3", "6"), offload, strict=True):
        settings = (*MIXED, "--max-steps", steps, "--optimizer.offload", where)
        trainer = start(train(base_model, server, run_dir, *settings, "--resume"))
        assert trainer.wait() == 0, trainer.output()
    records = steps_of(run_dir)
    assert [record["step"] for record in records] == list(range(1, 7))
    assert records[0]["kl_at_step_0"] < 1e-2
    assert all(0 <= record["kl_noise_floor"] < 1e-2 and record["entropy"] > 0 for record in records)
    model = safetensors.torch.load_file(run_dir / "model" / "model.safetensors")
    early, late = (
        safetensors.torch.load_file(run_dir / "checkpoints" / f"step-{step:08d}" / "masters" / "weights.safetensors")
        for step in (3, 6)
    )
    assert all(not torch.equal(late[name], early[name]) for name in late)
    assert late.keys() == model.keys()
    for name, master in late.items():
        assert (master.dtype, model[name].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(master.bfloat16(), model[name])
    assert_trained_exactly_once(server, run_dir)
