"""Surrogates: what each token's loss is, before the KL penalty and the average over tokens. One file for each.

To add one, write its file and its line in `Surrogates`; the rest of the program reads what the file says.
"""

from typing import TYPE_CHECKING, Literal, TypeAlias

from policy_trainer.surrogates.cispo import Cispo
from policy_trainer.surrogates.clip import Clip
from policy_trainer.surrogates.reinforce import Reinforce
from policy_trainer.surrogates.sapo import Sapo
from policy_trainer.surrogates.surrogate import Surrogate, SurrogateInputs, SurrogateLoss
from policy_trainer.surrogates.vespo import Vespo
from shared.settings import Section


class Surrogates(Section):
    """The settings of each surrogate, by its name."""

    clip: Clip = Clip()
    reinforce: Reinforce = Reinforce()
    cispo: Cispo = Cispo()
    sapo: Sapo = Sapo()
    vespo: Vespo = Vespo()


# The names, for the setting loss.surrogate.
if TYPE_CHECKING:
    SurrogateName: TypeAlias = str
else:
    SurrogateName = Literal[tuple(Surrogates.model_fields)]
