"""The reference model: a frozen causal LM and its tokenizer, which uploads must fit."""

from collections.abc import Callable, Sequence

import structlog
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ref_server.config import ServeConfig
from ref_server.queue.interface import Queue
from ref_server.scoring.loop import ScoringLoop
from ref_server.scoring.reference import ReferenceConflict, TooLarge, check_size
from ref_server.scoring.scorer import Scorer
from ref_server.scoring.snapshots import find_snapshot, load_like
from shared.api import ModelInfo
from shared.batch import TokenGroup
from shared.devices import describe_device
from shared.errors import UserError
from shared.logprobs import choose_forward, embedding_rows
from shared.models import context_length, load_model, load_tokenizer, tokenizer_fingerprint, use_threads

log = structlog.get_logger()


def load(config: ServeConfig) -> "FrozenModel":
    """The model that the settings name. Raises UserError."""
    assert config.model is not None
    use_threads(config.threads)
    device = describe_device(config.device)
    log.info("loading the reference model", model=config.model, device=device, dtype=config.dtype)
    model = load_model(config.model, revision=config.revision, device=config.device, dtype=config.dtype)
    return FrozenModel(model, load_tokenizer(config.model, revision=config.revision), config)


class FrozenModel:
    """A `Reference` that scores. snapshot, version: of weights that replaced the first ones."""

    scores_uploads = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: ServeConfig,
        *,
        snapshot: str | None = None,
        version: int = 0,
    ) -> None:
        assert config.model is not None
        forward = choose_forward(model)
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._vocabulary_size = embedding_rows(model)
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._version = version
        self.info = ModelInfo(
            name=config.model,
            revision=config.revision,
            vocabulary_size=self._vocabulary_size,
            context_length=context_length(model),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            reference_version=version,
            max_batch_tokens=config.max_batch_tokens,
            tokenizer_fingerprint=self._fingerprint,
            forward=forward.name,
            snapshot=snapshot,
        )
        self.score = Scorer(forward, version).score
        log.info("reference model ready", **self.info.model_dump(exclude={"tokenizer_fingerprint"}))

    def check_tokens(self, group: TokenGroup) -> None:
        """Ids within the vocabulary, then lengths within what server and model take."""
        group.check_ids(self._vocabulary_size, "the reference's vocabulary")
        check_size(group, self.info.max_batch_tokens)
        if self.info.context_length is not None and group.longest_row > self.info.context_length:
            raise TooLarge(
                "completion_lengths",
                f"and the prompt make a row of {group.longest_row} tokens; "
                f"the model's context is {self.info.context_length}",
            )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def replacement(self, snapshot: str, version: int) -> "FrozenModel":
        """Loads other weights beside these: for a while the device holds two models. A tokenizer is optional."""
        root = self._config.snapshot_root
        if root is None:
            raise ReferenceConflict(
                "no_snapshot_root", "the reference cannot be replaced: start ref-server with --snapshot-root DIRECTORY"
            )
        directory = find_snapshot(root, snapshot)
        if (snapshot, version) == (self.info.snapshot, self._version):
            return self
        if version <= self._version:
            raise ReferenceConflict(
                "older_version",
                f"version must be greater than {self._version}, which is in place; got {version}",
            )
        log.info("loading another reference", snapshot=snapshot, version=version)
        model = load_like(self._model, self._fingerprint, directory)
        try:
            return FrozenModel(model, self._tokenizer, self._config, snapshot=snapshot, version=version)
        except UserError as error:
            raise ReferenceConflict("bad_snapshot", str(error)) from error

    def scoring(self, queue: Queue, on_ready: Callable[[], None]) -> ScoringLoop:
        return ScoringLoop(self, queue, tokens_per_forward=self._config.scoring_tokens, on_ready=on_ready)
