"""The reference model: a frozen causal LM, once or on each of several devices, and its tokenizer."""

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

import structlog
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ref_server.config import ServeConfig
from ref_server.scoring.device_maps import DeviceMap, describe_devices, device_map_of, device_maps
from ref_server.scoring.reference import ReferenceRefused, TooLarge, check_size, prompts_of
from ref_server.scoring.scorer import Scorer
from ref_server.scoring.snapshots import find_snapshot, load_like
from ref_server.scoring.token_texts import token_texts
from ref_server.weights.catalog import version_of_snapshot
from shared.api import ModelInfo
from shared.batch import TokenGroup
from shared.devices import choose_device, describe_device
from shared.errors import UserError
from shared.logprobs import choose_forward, slowed_by
from shared.logprobs.vision import vision_of
from shared.models import (
    context_length,
    decode,
    embedding_rows,
    load_mapped_model,
    load_tokenizer,
    tokenizer_fingerprint,
    use_threads,
)
from shared.process import return_freed_memory

log = structlog.get_logger()


def load(config: ServeConfig) -> "FrozenModel":
    """The model that the settings name. Raises UserError."""
    assert config.model is not None
    use_threads(config.threads)
    devices = ", ".join(map(describe_device, config.all_devices))
    if all(choose_device(name).type != "cpu" for name in config.all_devices):
        return_freed_memory()
    log.info("loading a model", model=config.model, device=devices, dtype=config.dtype)
    models = [_load(config, device_map) for device_map in device_maps(config)]
    return FrozenModel(models, load_tokenizer(config.model, revision=config.revision), config)


class FrozenModel:
    """A `ReferenceModel` that scores.

    models: the same model on several devices, or on one. Each is tested as `choose_forward` does. snapshot, version,
    base: of weights that replaced the first ones.
    """

    scores_uploads = True

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        config: ServeConfig,
        *,
        snapshot: str | None = None,
        version: int = 0,
        base: str | None = None,
    ) -> None:
        assert config.model is not None
        forwards = [choose_forward(model) for model in models]
        model = models[0]
        slow = [slowed_by(form.name, each.dtype, each.device) for form, each in zip(forwards, models, strict=True)]
        self._models = models
        self._tokenizer = tokenizer
        self._config = config
        self._vision = vision_of(model)
        self.version = version
        self.replicas = [
            Scorer(forward, version, describe_devices(model)) for forward, model in zip(forwards, models, strict=True)
        ]
        self.base = base or _fingerprint(model)
        self.info = ModelInfo(
            name=config.model,
            revision=config.revision,
            vocabulary_size=embedding_rows(model),
            context_length=context_length(model),
            dtype=str(model.dtype).removeprefix("torch."),
            device=", ".join(replica.device for replica in self.replicas),
            reference_version=version,
            max_batch_tokens=config.max_batch_tokens,
            max_image_bytes=config.max_image_bytes if self._vision else 0,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            forward=", ".join(sorted({forward.name for forward in forwards})),
            slowed_by=next(filter(None, slow), None),
            snapshot=snapshot,
        )
        log.info("model ready", **self.info.model_dump(exclude={"tokenizer_fingerprint"}))

    def check_group(self, group: TokenGroup) -> None:
        """Ids within the vocabulary, then lengths within what server and model take, then images as the model's."""
        assert self.info.vocabulary_size is not None
        group.check_ids(self.info.vocabulary_size, "the reference's vocabulary")
        check_size(group, self.info)
        longest = group.longest_prompt + int(group.completion_lengths.max())
        if self.info.context_length is not None and longest > self.info.context_length:
            raise TooLarge(
                "completion_lengths",
                f"and {prompts_of(group)} make a row of {longest} tokens; "
                f"the model's context is {self.info.context_length}",
            )
        if self._vision is not None:
            self._vision.check(group)
            if group.teacher_prompt_ids is not None:
                self._vision.check(group.for_teacher())

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return decode(self._tokenizer, ids, skip_special_tokens=skip_special_tokens)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return token_texts(partial(decode, self._tokenizer), self._tokenizer.convert_ids_to_tokens, ids)

    def replacement(self, snapshot: str | None, version: int) -> "FrozenModel":
        """Loads other weights; for a while each device holds two models. A tokenizer is optional."""
        directory = None if snapshot is None else self._find(snapshot)
        if (snapshot, version) == (self.info.snapshot, self.version):
            return self
        if version <= self.version:
            raise ReferenceRefused(
                "older_version",
                f"version must be greater than {self.version}, which is in place; got {version}",
            )
        log.info("loading another reference", snapshot=snapshot, version=version)
        try:
            models = [self._load_like(model, directory) for model in self._models]
            return FrozenModel(
                models, self._tokenizer, self._config, snapshot=snapshot, version=version, base=self.base
            )
        except UserError as error:
            raise ReferenceRefused("bad_snapshot", str(error)) from error

    def _find(self, snapshot: str) -> Path:
        if version_of_snapshot(snapshot) is not None:
            return find_snapshot(self._config.data_dir, snapshot)
        root = self._config.snapshot_root
        if root is None:
            raise ReferenceRefused(
                "no_snapshot_root",
                "the reference cannot be replaced by this snapshot: start ref-server with --snapshot-root, or "
                "publish the weights to it and name them weights/RUN/LINEAGE/EPOCH/VERSION",
            )
        return find_snapshot(root, snapshot)

    def _load_like(self, model: PreTrainedModel, directory: Path | None) -> PreTrainedModel:
        """The weights of a directory, or those of `--model`, where those of `model` are."""
        if directory is None:
            return _load(self._config, device_map_of(model))
        assert self.info.tokenizer_fingerprint is not None
        return load_like(model, device_map_of(model), self.info.tokenizer_fingerprint, directory)


def _load(config: ServeConfig, device_map: DeviceMap) -> PreTrainedModel:
    assert config.model is not None
    return load_mapped_model(config.model, revision=config.revision, device_map=device_map, dtype=config.dtype)


def _fingerprint(model: PreTrainedModel) -> str:
    """Tells models apart by the first numbers of each of their weights, wherever they were loaded from."""
    digest = sha256()
    for name, weights in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weights.shape)}".encode())
        digest.update(weights.flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()
