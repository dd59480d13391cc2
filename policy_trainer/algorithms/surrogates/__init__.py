"""Surrogates: the loss of each token before the KL penalty and the aggregation. Each has its own file.

To add one, write its file and add a line to `Surrogates`: the rest of the program learns about it from there.
"""

from typing import TYPE_CHECKING, Literal, TypeAlias

from policy_trainer.algorithms.surrogates.cispo import Cispo
from policy_trainer.algorithms.surrogates.clip import Clip
from policy_trainer.algorithms.surrogates.reinforce import Reinforce
from policy_trainer.algorithms.surrogates.sapo import Sapo
from policy_trainer.algorithms.surrogates.surrogate import Surrogate, SurrogateInputs, SurrogateLoss
from policy_trainer.algorithms.surrogates.vespo import Vespo
from shared.settings import Section


class Surrogates(Section):
    """The settings of all surrogates, each in the table of its name."""

    clip: Clip = Clip()
    reinforce: Reinforce = Reinforce()
    cispo: Cispo = Cispo()
    sapo: Sapo = Sapo()
    vespo: Vespo = Vespo()


# The names that the setting loss.surrogate accepts.
if TYPE_CHECKING:
    SurrogateName: TypeAlias = str
else:
    SurrogateName = Literal[tuple(Surrogates.model_fields)]
