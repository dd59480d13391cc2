"""A rank that hangs ends the job, whatever rank 0 wants of it."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["send", pytest.param("compute", marks=pytest.mark.long)])
def test_rank_0_waits_no_longer_than_its_timeout(wish: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.run(
        [*launcher, str(Path(__file__).with_name("deaf.py")), wish], capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 1
    assert "did not answer for 6 s (--rank-timeout-seconds)" in job.stderr
    assert "[rank0]: Traceback" not in job.stderr
