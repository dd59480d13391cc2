"""Checks that a run fits a server: vocabulary and tokenizer, room for a group and for a step, the reference model."""

import math
from collections.abc import Mapping

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import SamplingConfig, TrainConfig
from policy_trainer.data.prompts import prompt_limit
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.trainer.queue_client.server import in_flight_allowance
from shared.api import ModelInfo, QueueView
from shared.client import RefServerClient
from shared.errors import UserError
from shared.models import embedding_rows, tokenizer_fingerprint
from shared.spelling import spell_setting

# Equal models differ by rounding only, and the noise floor is the rounding between two packings of the policy. On one
# device both have the same size; thirty times the floor is no rounding.
_MARGIN = 30.0
# The floor may be 0, and says nothing of a server with another device or precision. So the KL may always be this large,
# by the coarser of the two precisions, in nats a token. Log-probs that differ by 1e-3 (float32 multiplied as TF32) have
# a KL of 5e-7. Pretrained models (SmolLM2 135M, Gemma 3 270M) in bfloat16 are 1e-3 from float32 on plain text, and 5e-3
# on odd text. Models of another seed, size or training are 0.1 nats apart and more.
_ROUNDING: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 1e-2}


def check_server(
    client: RefServerClient, config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[ModelInfo, QueueView]:
    """The server's model and queue. Raises UserError for a server whose model or limits do not suit the run, and
    RefServerError unless the token may train. model: the policy; only its shapes are read."""
    reference = client.model()
    client.check_train_role()
    check_reference(reference, config)
    check_models_match(reference, model, tokenizer, config.model)
    check_group_fits(reference, config.sampling, prompt_limit(model, config))
    queue = client.queue(config.run)
    check_room(queue, config.groups_per_step)
    return reference, queue


def check_reference(reference: ModelInfo, config: TrainConfig) -> None:
    """Raises UserError if the KL penalty or a distillation needs a model that the server does not have."""
    if reference.name is None and config.penalised_by_server:
        raise UserError(
            "server: it has no reference model (`--no-model`), and the KL penalty needs one",
            f"start it with: `ref-server serve --model {config.model}`, or train without the penalty: "
            f"{spell_setting('loss.beta', 0)}",
        )
    if reference.name is None and config.scored_by_server:
        raise UserError(
            "server: it has no model (`--no-model`), and distillation needs a teacher",
            f"start it with: `ref-server serve --model {config.model if config.teaches_itself else 'TEACHER'}`",
        )
    another = config.loss.distillation and not config.teaches_itself
    if another and config.penalised_by_server and reference.teacher is None:
        raise UserError(
            f"server: its model, {reference.name}, is the reference of the KL penalty, and distillation needs a "
            "teacher besides",
            f"start it with: `ref-server serve --model {config.model} --teacher TEACHER`, or train without the "
            f"penalty, by its model as the teacher: {spell_setting('loss.beta', 0)}",
        )
    # Without a penalty the server's only model is the teacher.
    teacher = reference.teacher or (None if config.penalised_by_server else reference.name)
    if config.teacher is not None and config.teacher != teacher:
        raise UserError(
            f"teacher: the server's teacher is {teacher}, but the setting is {config.teacher}",
            f"leave {spell_setting('teacher')} out, or start a server whose teacher is {config.teacher}",
        )
    if config.reference.sync_steps and not config.penalised_by_server and reference.teacher is not None:
        raise UserError(
            f"reference.sync_steps: the server has a teacher of its own, {reference.teacher}, so nothing uses its "
            "reference",
            f"start it without `--teacher`, or set {spell_setting('reference.sync_steps', 0)}",
        )


def check_models_match(
    reference: ModelInfo, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Raises UserError unless the reference has the same vocabulary and tokenizer: its log-probs belong to token ids.

    A server without a model is not compared.
    """
    if reference.name is None:
        return
    rows = embedding_rows(model)
    if rows > (reference.vocabulary_size or 0):  # models of one family may differ in rows that no token has
        raise UserError(
            f"model: {name} has a vocabulary of {rows} tokens, the server's reference {reference.name} has "
            f"{reference.vocabulary_size}",
            "start ref-server with the model that this policy was trained from",
        )
    if tokenizer_fingerprint(tokenizer) != reference.tokenizer_fingerprint:
        raise UserError(
            f"model: the tokenizer of {name} is not that of the server's reference {reference.name}",
            "start ref-server with the model that this policy was trained from",
        )


def check_group_fits(reference: ModelInfo, sampling: SamplingConfig, prompt: int) -> None:
    """Raises UserError if the server would reject the longest groups: the run would only train on shorter ones.

    prompt: the most tokens of a prompt, see `prompt_limit`.
    """
    tokens = prompt + sampling.num_generations * sampling.max_completion_length
    if tokens > reference.max_batch_tokens:
        raise UserError(
            f"sampling.num_generations, sampling.max_completion_length: {sampling.num_generations} completions of "
            f"{sampling.max_completion_length} tokens and a prompt of {prompt} have {tokens}, and the server takes "
            f"batches of {reference.max_batch_tokens} at most",
            "lower them, or data.max_prompt_length, or start the server with: `ref-server serve --max-batch-tokens "
            f"{tokens}`",
        )


def check_room(queue: QueueView, groups_per_step: int) -> None:
    """Raises UserError if the queue is so small that a step would wait forever."""
    room = min(queue.limits.max_batches, queue.limits.max_batches_per_run)
    if groups_per_step > room:
        raise UserError(
            f"groups_per_step: a step needs {groups_per_step} groups and the server holds {room} at most",
            "lower it, or raise `--queue.max-batches` and `--queue.max-batches-per-run` of ref-server",
        )
    allowance = in_flight_allowance(queue)
    if 2 * groups_per_step > allowance:
        raise UserError(
            f"groups_per_step: a step needs {groups_per_step} groups, which must be at most half of the {allowance} "
            "batches that the server leases at once, since the other half may wait for a checkpoint",
            "lower it, or raise `--queue.max-in-flight` and `--queue.max-in-flight-per-run` of ref-server to "
            f"{2 * groups_per_step}",
        )


def check_first_kl(config: TrainConfig, reference: ModelInfo, dtype: str, kl: float, noise_floor: float) -> str | None:
    """What to tell the user about the KL of a run's first batches; None if nothing is compared.

    reference: the server's model. dtype: the policy's, as in `float32`. kl, noise_floor: in nats a token.
    Raises RunFailed if the reference is not the model that the policy begins as, and must be.
    """
    measured = f"{kl:.2g} nats a token (from rounding: {noise_floor:.1g})"
    if not config.loss.beta and (reference.teacher is not None or not config.teaches_itself):
        # Without a penalty the server's only model is the teacher of a distillation: another one on purpose.
        only_teacher = config.loss.distillation and reference.teacher is None
        return f"KL to the teacher before the first update: {measured}" if only_teacher else None
    if config.loss.beta and config.reference.source == "adapter-off":  # the adapters change nothing at first
        return f"the reference is the policy without its adapters; KL before the first update: {kl:.2g} nats a token"
    text = f"KL to the reference before the first update: {measured}"
    if config.expect_reference == "different":
        return text
    rounding = max(_ROUNDING.get(name, math.inf) for name in (dtype, reference.dtype or dtype))
    largest = max(_MARGIN * noise_floor, rounding)
    if kl <= largest:
        return f"{text}: the policy begins as the reference"
    precision = "" if reference.dtype in (None, dtype) else f" --dtype {dtype}"
    raise RunFailed(
        f"expect_reference: before the first update the KL to the server's reference, {reference.name or '?'}, is "
        f"{measured}.\n"
        f"Equal models have {largest:.1g} at most: the reference is not the model that the policy begins as",
        f"start the server with: `ref-server serve --model {config.model}{precision}`, remove {config.run_dir}, and "
        "train again;\n"
        f"or say {spell_setting('expect_reference', 'different')}, if the KL penalty is meant to pull towards another "
        "model",
    )
