"""Loads the policy of a training run, with its learner, sampler and evaluator."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import TrainConfig
from policy_trainer.config.train import cautions
from policy_trainer.data.problem import Task
from policy_trainer.data.prompts import PromptEncoder, prompt_encoder
from policy_trainer.data.rendering import load_prompt_tokenizer
from policy_trainer.data.tasks.compatibility import check_compatibility
from policy_trainer.learner.adapters import adapt, has_adapters, read_adapters, save_unrounded, save_whole
from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
from policy_trainer.learner.groups import PartWeights
from policy_trainer.learner.interface import LoadedLearner, PolicyLearner, WritesWeights
from policy_trainer.learner.learner import Learner
from policy_trainer.learner.optimizer import OFFLOADED_FROM_CPU, PURE_BFLOAT16, trained
from policy_trainer.learner.ranks.lead import load_lead
from policy_trainer.learner.ranks.sharded_checkpoint import has_shards, load_from_shards, restore_from_shards
from policy_trainer.learner.ranks.world import World
from policy_trainer.reporting.display import Display
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rewards.registry import part_weights, tagged_rewards
from policy_trainer.rollout.device_turns import DeviceTurns, in_turn
from policy_trainer.rollout.environments.rollouts import open_sessions
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import Sampler
from policy_trainer.run_files.checkpoint import holds_masters, restore, write_weights
from policy_trainer.trainer.evaluation.evaluator import Evaluator, make_evaluator
from policy_trainer.trainer.plan import Planner, Unplanned, load_teacher_outline, prompt_lengths
from policy_trainer.weights.quantised import load_base
from shared.devices import choose_device
from shared.logprobs import choose_forward, slowed_by
from shared.models import load_model, load_outline
from shared.spelling import spell_setting


@dataclass(frozen=True)
class Policy:
    """A model's tokenizer, learner, sampler and evaluator. write: writes its weights into a checkpoint. save: writes a
    whole Hugging Face model. form: of the forward, for people.

    tagged_rewards: the rewards that look for answer tags. part_weights: of all rewards, by name. turns: with the
    workers, if the device has no room for all. close: ends the tools' processes.
    """

    tokenizer: PreTrainedTokenizerBase
    learner: PolicyLearner
    sampler: Sampler
    write: WritesWeights
    save: Callable[[Path], None]
    form: str
    evaluator: Evaluator
    tagged_rewards: frozenset[str]
    part_weights: PartWeights
    turns: DeviceTurns | None
    close: Callable[[], None]

    def turn(self) -> AbstractContextManager[None]:
        """The block has the device for itself."""
        return in_turn(self.turns)


def load_reward_scorer(config: TrainConfig, task: Task, checkpoint: Path | None) -> RewardScorer:
    """Loads the tokenizer and the judge, the parts of a policy that need no weights.

    Raises UserError for unusable rewards or an unusable tokenizer.
    """
    source, revision = _source(config, checkpoint)
    return RewardScorer(load_prompt_tokenizer(source, config.data, revision=revision), task, config)


def check_model(
    config: TrainConfig, task: Task, checkpoint: Path | None, judge: RewardScorer, display: Display
) -> PreTrainedModel:
    """The model's shapes, after checking that they are compatible with its tokenizer, the problems and the rewards.

    Raises UserError for a model that cannot be used.
    """
    source, revision = _source(config, checkpoint)
    outline = load_outline(source, revision=revision)
    for remark in check_compatibility(config, task, judge.tokenizer, outline):
        display.note(str(remark))
    return outline


def warn_of_memory(
    config: TrainConfig, task: Task, checkpoint: Path | None, judge: RewardScorer, display: Display, ranks: int
) -> None:
    """Notes what will not fit on the devices of this machine. ranks: that share the policy's weights.

    Raises UserError for a model that cannot be read, and for what ranks cannot do.
    """
    source, revision = _source(config, checkpoint)
    outline = load_outline(source, revision=revision)
    make_planner = partial(Planner, outline, None, ranks=ranks, teacher=load_teacher_outline(config))
    try:
        short = make_planner().shortages(config)
        if short:  # measuring prompts takes longer than planning without
            lengths, _ = prompt_lengths(prompt_encoder(config, judge.tokenizer, outline), task)
            short = make_planner(prompt=max(lengths, default=None)).shortages(config)
    except Unplanned as error:
        display.note(str(error))
        return
    for shortage in short:
        display.note(f"this may run out of memory: {shortage} (`policy-trainer doctor --plan` says more)")


def load_policy(
    config: TrainConfig,
    task: Task,
    checkpoint: Path | None,
    judge: RewardScorer,
    turns: DeviceTurns | None,
    display: Display,
    world: World | None = None,
) -> Policy:
    """Loads the policy from the checkpoint, or from config.model without one. world: the ranks that share its weights.

    The caller closes it. Raises UserError for a model that cannot be used.
    """
    source, revision = _source(config, checkpoint)
    tokenizer = judge.tokenizer
    if PromptEncoder(tokenizer, config.data).in_chat(first := task.problem(0)) and first.prompt:
        display.note(  # TRL takes such prompts as they stand
            "data: prompts that are texts are user messages of the model's chat template; "
            f"{spell_setting('data.prompt_style', 'plain')} takes them as they stand"
        )
    with ExitStack() as stack:
        sessions = open_sessions(config, judge, stack)  # mistakes in tools show before the model is loaded
        display.note(f"loading the model {source}")
        weights = part_weights(config, task)
        loaded = (
            load_in_one_process(config, source, revision, checkpoint, tokenizer, weights)
            if world is None
            else load_lead(config, source, revision, checkpoint, tokenizer, world, weights)
        )
        learner = loaded.learner
        evaluator = make_evaluator(
            config, task, judge, learner.model, sessions, batch_size=config.evaluation.batch_size
        )
        close = stack.pop_all().close
    display.note(f"checked: log-probs, computed in the {loaded.form} form, equal those of a plain forward")
    if slow := slowed_by(loaded.form, learner.model.dtype, choose_device(config.device)):
        display.note(slow)
    if learner.model.dtype == torch.bfloat16 and config.optimizer.master_weights == "none":
        display.note(PURE_BFLOAT16)
    if config.optimizer.offload == "cpu" and choose_device(config.device).type == "cpu":
        display.note(OFFLOADED_FROM_CPU)
    for caution in cautions(config):
        display.note(caution)
    return Policy(
        tokenizer=tokenizer,
        learner=learner,
        sampler=loaded.sampler,
        write=loaded.write,
        save=loaded.save,
        form=loaded.form,
        evaluator=evaluator,
        tagged_rewards=tagged_rewards(config.rewards or task.default_rewards, task.correct),
        part_weights=weights,
        turns=turns,
        close=close,
    )


def _source(config: TrainConfig, checkpoint: Path | None) -> tuple[str, str | None]:
    """Where weights and tokenizer are, and the revision of a Hub model. A checkpoint of LoRA has only the adapters."""
    return (str(checkpoint), None) if checkpoint and not config.lora.rank else (config.model, config.revision)


def load_in_one_process(
    config: TrainConfig,
    source: str,
    revision: str | None,
    checkpoint: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    weights: PartWeights,
) -> LoadedLearner:
    """All of the policy in this process. weights: of the rewards, by name. Raises UserError for an unusable model."""
    sharded = checkpoint if checkpoint and has_shards(checkpoint) else None
    model = _load_model(config, source, revision, checkpoint, sharded)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    forward = choose_forward(model)
    learner = Learner(model, forward, config, part_weights=weights)
    in_model = checkpoint and not holds_masters(checkpoint)  # written with master_weights = saved
    if learner.weights.masters and not sharded and (learner.weights.saves_masters or in_model):
        learner.weights.load(_unrounded(model, config, source, revision, checkpoint))
    if sharded:
        restore_from_shards(learner.weights, sharded)
    elif checkpoint:
        restore(checkpoint, learner.weights)
    write = partial(write_weights, model, tokenizer, learner.weights)
    save = partial(save_whole, model, tokenizer)
    if learner.weights.saves_masters and not has_adapters(model):
        save = partial(save_unrounded, model, tokenizer, masters=learner.weights.masters)
    return LoadedLearner(learner, HFSampler(model, tokenizer), write, save, forward.name)


def _unrounded(
    model: PreTrainedModel, config: TrainConfig, source: str, revision: str | None, checkpoint: Path | None
) -> dict[str, Tensor]:
    """The trainable weights, unrounded, as their files have them, by name; none for new adapters."""
    if has_adapters(model):
        directory = checkpoint or config.lora.path
        return read_adapters(model, directory) if directory else {}
    saved = load_model(source, revision=revision, device="cpu", dtype="float32")
    return {name: saved.get_parameter(name) for name in trained(model)}


def _load_model(
    config: TrainConfig, source: str, revision: str | None, checkpoint: Path | None, sharded: Path | None
) -> PreTrainedModel:
    """sharded: the checkpoint, if ranks wrote it. Adapters of ranks come with what the optimizer steps."""
    if sharded and not config.lora.rank:
        return load_from_shards(sharded, device=config.device, dtype=config.dtype)
    model = load_base(source, config.lora, revision=revision, device=config.device, dtype=config.dtype)
    adapt(model, config, None if sharded else checkpoint)
    return model
