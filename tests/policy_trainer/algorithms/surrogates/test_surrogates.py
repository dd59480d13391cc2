"""What a surrogate's file must have. test_loss.py has them by hand, proofs/ against loops."""

import subprocess
import sys
from inspect import getmodule

import pytest

from policy_trainer.algorithms.surrogates import Surrogate, Surrogates
from tests.policy_trainer.proofs import oracle

SURROGATES: dict[str, Surrogate] = dict(Surrogates())


@pytest.mark.parametrize("name", SURROGATES)
def test_its_file_names_its_twin(name: str) -> None:
    module = getmodule(type(SURROGATES[name]))
    assert module is not None and module.__name__ == f"policy_trainer.algorithms.surrogates.{name}"
    words = " ".join((module.__doc__ or "").split())
    assert f"Its float64 twin is `{name}` in tests/policy_trainer/proofs/oracle.py" in words
    assert callable(getattr(oracle, name))


def test_settings_need_no_pytorch() -> None:
    program = "import sys, policy_trainer.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
