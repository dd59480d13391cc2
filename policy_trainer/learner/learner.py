"""The learner: trains a model with its optimizer, one step at a time."""

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.algorithms.objective.advantages import advantages
from policy_trainer.algorithms.objective.aggregation import Totals, token_weights, update_mean
from policy_trainer.algorithms.objective.corrections import importance_sampling_weights
from policy_trainer.algorithms.objective.entropy import EntropyBonus, with_high_entropy
from policy_trainer.algorithms.objective.functions import check_functions
from policy_trainer.algorithms.objective.group import Group, LossInputs
from policy_trainer.algorithms.objective.kl import k3
from policy_trainer.algorithms.objective.loss import TokenLoss, token_loss
from policy_trainer.algorithms.objective.ratios import sequence_means
from policy_trainer.config import ReferenceSource, TrainConfig
from policy_trainer.config.functions import function_label, is_function
from policy_trainer.data.completion import Probe, probe_tokens
from policy_trainer.learner.adapters import adapters_off, policy_state
from policy_trainer.learner.groups import PartWeights, make_group, trains, with_old_logps
from policy_trainer.learner.micro_batches import Ranks, cut, join, split_evenly, totals
from policy_trainer.learner.optimizer import clip_gradients, learning_rates, make_weights, step_weights
from policy_trainer.learner.routing import routing_of
from policy_trainer.learner.step_stats import StepStats, Sums, Update, joined, micro_batch_sums, step_stats
from shared.batch import Array, Batch, TokenGroup
from shared.devices import widest_float
from shared.errors import UserError
from shared.logprobs import LogprobForward


class Learner:
    """Trains `model` through `forward`, which computes its log-probs.

    part_weights: weights of the rewards, by name. ranks: the processes that share the model; default: this process has
    all of it. updated: whether the latest step has begun to change the weights.
    The model stays in evaluation mode: with dropout the policy would differ from itself, and the KL at step 0 from 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: LogprobForward,
        config: TrainConfig,
        *,
        part_weights: PartWeights | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        loss = config.loss
        check_functions(loss)
        if loss.old_logps == "recomputed" and config.num_iterations * config.minibatches == 1:
            # Before a single update recomputed log-probs equal the current ones. This saves a forward.
            loss = loss.model_copy(update={"old_logps": "current"})
        self.model = model.eval()
        self._forward = forward
        self._config = config
        self._loss = loss
        self._source: ReferenceSource = config.reference.source if loss.beta else "server"
        self._make = partial(make_group, loss=loss, reference=self._source, weights=part_weights or {})
        self._ranks = ranks or Ranks()
        self._routing = routing_of(model, forward, loss.router_aux_loss_coef)
        if self._routing and ranks:
            raise UserError("loss.router_aux_loss_coef: several ranks do not compute it", "set 0, or use one process")
        self.bonus = EntropyBonus(loss.entropy)
        self.weights = make_weights(model, config.optimizer)
        self.updated = False
        self._metrics: tuple[str, ...] | None = None

    def step(
        self,
        batches: Sequence[Batch],
        *,
        step: int,
        on_groups: Callable[[Sequence[Group]], None] = lambda groups: None,
    ) -> StepStats:
        """Trains on whole groups. No update is made if no group trains, or if the loss or gradient is not finite.

        step: number of earlier steps, the version of the weights. The learning rates depend on nothing else, so that
        resuming needs no state.
        on_groups: called with the group of each batch; those that train have their advantages.
        Raises ValueError for a batch that lacks what the loss needs, UserError for a function of the user's that
        fails, and RuntimeError if it runs out of memory; `updated` then says whether the weights have changed.
        """
        self.updated = False
        groups, training = self._prepare(batches, step)
        on_groups(groups)
        rates = learning_rates(step, self._config)
        parts = self._parts(training)
        passes = parts * self._config.num_iterations
        updates = [self._update(part, rate) for part, rate in zip(passes, rates, strict=False)]
        if step == 0 and is_function(self._loss.surrogate) and not all(update.finite for update in updates):
            raise UserError(
                f"loss.surrogate: the loss or gradient of {function_label(self._loss.surrogate)} is not finite in the "
                "first step",
                "compute on tokens.ratio, which is bounded, and select with torch.where before functions that have "
                "no finite gradient",
            )
        return step_stats(groups, training, updates, of_pass=len(parts), learning_rates=rates)

    def _parts(self, groups: Sequence[Group]) -> list[list[Group]]:
        """The groups of each update in one pass."""
        pieces = math.ceil(self._config.minibatches / self._config.groups_per_step)
        divided = [piece for group in groups for piece in group.divided(min(pieces, group.tokens.size))]
        return [divided[part] for part in split_evenly(len(divided), self._config.minibatches)]

    def failures(self, batches: Sequence[Batch], *, step: int) -> list[Exception | None]:
        """What a step on each batch by itself raises, or None. To be called when a step has raised.

        It changes no weights, and leaves neither gradients nor activations.
        """
        return [self._failure(batch, step) for batch in batches]

    def _failure(self, batch: Batch, step: int) -> Exception | None:
        self._discard_gradients()
        try:
            self.noise_floor([batch])
            self.kl([batch])
            groups, training = self._prepare([batch], step)
            updates = [self._gradients(training)[0]] if training else []
            step_stats(groups, training, updates, of_pass=1, learning_rates=[0.0])
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold the activations
            return error
        finally:
            self._discard_gradients()
        return None

    def _discard_gradients(self) -> None:
        self.weights.finish_gradients()
        self.model.zero_grad(set_to_none=True)
        self.weights.optimizer.zero_grad(set_to_none=True)
        if self._routing is not None:
            self._routing.forget()
        torch.cuda.empty_cache()  # joins fragmented memory; does nothing without CUDA

    def _prepare(self, batches: Sequence[Batch], step: int) -> tuple[list[Group], list[Group]]:
        """The groups of all batches, and those of them that train. The latter have advantages."""
        groups = [self._make(batch, step=step) for batch in batches]
        training = [group for group in groups if trains(group, self._loss)]
        training = self._with_reference(training)
        training = with_old_logps(training, self._loss, self._recompute)
        values = advantages(training, self._loss)
        training = [replace(group, advantages=computed) for group, computed in zip(training, values, strict=True)]
        trained = iter(training)
        return [next(trained) if trains(group, self._loss) else group for group in groups], training

    def _with_reference(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the reference's log-probs, where these are known.

        They come with the batch, from a server with a model, or from the frozen weights of this model without its
        adapters: no second model is loaded.
        """
        if self._source == "server" or not groups:
            return list(groups)
        with adapters_off(self.model):
            logps = self._recompute(groups)
        return [replace(group, ref_logps=values) for group, values in zip(groups, logps, strict=True)]

    def restore_bonus(self, coef: float, entropy: float) -> None:
        """Sets the entropy bonus to its state in a checkpoint."""
        self.bonus.restore(coef, entropy)

    def _recompute(self, groups: Sequence[Group]) -> list[Array]:
        """Log-probs under the current policy, packed as in the updates: in half precision the values depend on it."""
        if not groups:
            return []
        values = [logps for part in self._parts(groups) for logps in self._values(*_inputs(part), self._forward)]
        return np.split(np.concatenate(values), np.cumsum([len(group.tokens.completion_ids) for group in groups])[:-1])

    def _entropies(self, groups: Sequence[Group]) -> list[Array]:
        return self._values(*_inputs(groups), lambda *inputs: self._forward.with_entropy(*inputs)[1])

    @torch.no_grad()
    def _values(
        self, tokens: Sequence[TokenGroup], temperatures: Sequence[float], forward: Callable[..., Tensor]
    ) -> list[Array]:
        """(C,) of each group, where `forward` has a value for each token."""
        ends = np.cumsum([len(group.completion_ids) for group in tokens])
        values = torch.zeros(int(ends[-1]), dtype=torch.promote_types(self.model.dtype, torch.float32))
        places = torch.arange(len(values)).tensor_split(torch.from_numpy(ends[:-1]))
        for part, counts in self._ranks.parts(tokens, self._config.micro_batch_tokens):
            computed = forward([tokens[i] for i in part], [temperatures[i] for i in part])
            if counts:
                values[torch.cat([places[i] for i in part])] = computed.cpu()
        # Each token has been computed by one rank, and is 0 on the others.
        return np.split(torch.stack(self._ranks.gather(values)).sum(0).numpy(), ends[:-1])

    def _update(self, groups: Sequence[Group], lr: float) -> Update:
        """One update on these groups, unless loss or gradient is not finite."""
        update, total = self._gradients(groups)
        if update.finite:
            self.updated = True
            step_weights(self.weights, self._config.optimizer, lr)
            if total.explored:
                self.bonus.observe(update.sums.explored_entropy)
        return replace(update, entropy_coef=self.bonus.coef)

    def _gradients(self, groups: Sequence[Group]) -> tuple[Update, Totals]:
        """Forward and backward of one update. The gradients are left in the weights."""
        groups = with_high_entropy(groups, self._loss, self._entropies)
        total = totals(groups, self._config.sampling.max_completion_length)
        self.weights.optimizer.zero_grad(set_to_none=True)
        parts = []
        for part, counts in self._ranks.parts([group.tokens for group in groups], self._config.micro_batch_tokens):
            micro_batch = [groups[i] for i in part]
            if not counts:
                micro_batch = [
                    replace(group, sequence_mask=np.zeros_like(group.sequence_mask)) for group in micro_batch
                ]
            parts.append(self._accumulate(micro_batch, total))
        self._compare_names()
        mine = joined(parts)
        sums = joined([replace(mine, columns=columns) for columns in self._ranks.gather(mine.columns)])
        return Update(sums, clip_gradients(self.weights, self._config.optimizer), self.bonus.coef), total

    def _accumulate(self, groups: Sequence[Group], total: Totals) -> Sums:
        """Forward and backward of one micro-batch, and its sums for the statistics."""
        loss = self._loss
        tokens = join(groups, self.model.device)
        logps, entropy = self._forward.with_entropy(*_inputs(groups), entropy_grad=self.bonus.applied != 0)
        current, sampler_logps = logps.detach(), tokens.sampler_logps
        ours = current if loss.old_logps == "sampler" else tokens.denominator(current)
        assert sampler_logps is not None  # NaN where unknown
        weights, *importance = importance_sampling_weights(ours, sampler_logps, tokens.sequence_ids, tokens.mask, loss)
        if loss.importance_sampling_correction != "none":  # the statistics are logged even when it is off
            tokens = replace(tokens, importance_weights=weights)
        per_token = token_loss(logps, tokens, loss)
        self._keep_names(tuple(per_token.metrics))
        shares = token_weights(loss.aggregation, tokens.sequence_ids, tokens.mask, total)
        policy_loss = total_loss = (shares.to(logps.dtype) * per_token.loss).sum()
        explored_entropy = update_mean(entropy, tokens.explored, total.explored)
        if coef := self.bonus.applied:
            total_loss = total_loss - coef * explored_entropy
        losses = {"policy_loss": policy_loss}
        if loss.echo_coef:
            observed = torch.from_numpy(np.concatenate([group.observed for group in groups])).to(self.model.device)
            echo = update_mean(-logps, observed, total.observed)
            losses["echo_loss"] = echo if total.observed else torch.full_like(echo, math.nan)
            total_loss = total_loss + loss.echo_coef * echo
        if self._routing is not None:
            losses["aux_loss"] = self._routing.loss(groups, total)
            total_loss = total_loss + self._routing.coef * losses["aux_loss"]
        total_loss.backward()
        # By the names in policy_trainer/metrics.py.
        values = {
            "loss": total_loss,
            **losses,
            "entropy": entropy,
            **_values(per_token, tokens),
            **_drift(ours, sampler_logps, *importance),
            **per_token.metrics,
        }
        return micro_batch_sums(values, tokens.mask, explored_entropy)

    def _keep_names(self, metrics: tuple[str, ...]) -> None:
        """Keeps the names of the surrogate's metrics. Raises UserError if they are not those of earlier calls."""
        before = self._metrics
        if before is not None and metrics != before:
            raise UserError(
                f"loss.surrogate: returned the metrics {', '.join(metrics) or 'none'}, and before "
                f"{', '.join(before) or 'none'}",
                "return the same ones each time",
            )
        self._metrics = metrics

    def _compare_names(self) -> None:
        """Raises UserError on all ranks if they have other metrics, whose sums could not be added."""
        if not is_function(self._loss.surrogate):
            return
        names = ", ".join(self._metrics or ()) or "none"
        if len({int(each) for each in self._ranks.gather(torch.tensor(crc32(names.encode())))}) > 1:
            raise UserError(
                f"loss.surrogate: returned other metrics on other ranks, here {names}", "return the same ones"
            )

    def kl(self, batches: Sequence[Batch]) -> float:
        """Mean k3 per sampled token between the current policy and the reference, over whole batches, without training.
        NaN if a batch lacks the reference's log-probs."""
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                [group] = self._with_reference([self._make(batch)])
                if group.ref_logps is None:
                    return math.nan
                logps = self._forward([group.tokens], [group.temperature])
                differences = _sampled(torch.tensor(group.ref_logps, device=logps.device) - logps, group.loss_mask)
                total, count = total + _sum(k3(differences)), count + len(differences)
        return total / max(count, 1)

    def logps(self, batches: Sequence[Batch]) -> list[Array]:
        """float32 (C,) of each batch: the policy's log-probs now, at the batch's temperature."""
        tokens, temperatures = [batch.group for batch in batches], [batch.temperature for batch in batches]
        return [logps.astype(np.float32) for logps in self._values(tokens, temperatures, self._forward)]

    @torch.no_grad()
    def probe(self, batches: Sequence[Batch]) -> Probe:
        """The current log-probs of a few tokens of the batch with the shortest prompt."""
        shortest = min((batch.group for batch in batches), key=lambda group: len(group.prompt_ids))
        group = probe_tokens(shortest)
        logps = self._forward([group], [1.0])
        return Probe(group.prompt_ids.tolist(), [ids.tolist() for ids in group.completions()], logps.tolist())

    def state(self) -> dict[str, Tensor]:
        """A copy of what is published; see `policy_state`."""
        return policy_state(self.model)

    def parameters(self) -> dict[str, Tensor]:
        """A copy of what the optimizer steps, float32 on the CPU, by names in the model; a tied weight once."""
        stepped = self.weights.stepped.items()
        return {name: weight.detach().to("cpu", torch.float32, copy=True) for name, weight in stepped}

    def noise_floor(self, batches: Sequence[Batch]) -> float:
        """Mean k3 per sampled token between two forwards of the policy: packed as in training, and half a group at a
        time, since training also packs a large group by itself.

        A KL to the reference that is no larger than this is noise: in half precision a matrix product depends on its
        shapes.
        """
        groups = [(batch.group, batch.temperature) for batch in batches]
        masks = [batch.loss_mask for batch in batches]
        total, count = 0.0, 0
        with torch.no_grad():
            for part in cut([group.tokens for group, _ in groups], self._config.micro_batch_tokens):
                packed = self._forward(*zip(*groups[part], strict=True))
                halves = [(half, temperature) for group, temperature in groups[part] for half in group.halves()]
                in_halves = torch.cat([self._forward([half], [temperature]) for half, temperature in halves])
                lengths = [len(group.completion_ids) for group, _ in groups[part]]
                differences = zip((packed - in_halves).split(lengths), masks[part], strict=True)
                sampled = torch.cat([_sampled(values, mask) for values, mask in differences])
                total, count = total + _sum(k3(sampled)), count + len(sampled)
        return total / max(count, 1)


def _values(per_token: TokenLoss, tokens: LossInputs) -> dict[str, Shaped[Tensor, " C"]]:
    """Metrics of the loss of each token."""
    low, high = per_token.clipped_low, per_token.clipped_high
    of_completion = partial(sequence_means, sequence_ids=tokens.sequence_ids, mask=tokens.mask)
    return {
        "kl": per_token.kl,
        "clip_ratio_low": low,
        "clip_ratio_low_min": of_completion(low),
        "clip_ratio_high": high,
        "clip_ratio_high_max": of_completion(high),
        "ratio_mean": per_token.ratio,
        "ratio_min": per_token.ratio,
        "ratio_max": per_token.ratio,
        "masked_ratio": per_token.untrusted,
    }


def _drift(
    ours: Float[Tensor, " C"],
    sampler_logps: Float[Tensor, " C"],
    weights: Float[Tensor, " C"],
    clipped: Bool[Tensor, " C"],
) -> dict[str, Shaped[Tensor, " C"]]:
    """Metrics of each token, of how far the learner is from the sampler. ours: the log-probs before the step where
    old_logps = recomputed or log_linear, else the current ones. weights: of the importance-sampling correction, before
    truncation. clipped: where a weight was truncated."""
    difference = (ours - sampler_logps).abs()
    return {
        "sampling_logp_difference_mean": difference,
        "sampling_logp_difference_max": difference,
        "importance_sampling_ratio_mean": weights,
        "importance_sampling_ratio_min": weights,
        "importance_sampling_ratio_max": weights,
        "importance_sampling_clip_ratio": clipped,
        "effective_sample_size": weights,
    }


def _inputs(groups: Sequence[Group]) -> tuple[list[TokenGroup], list[float]]:
    """The tokens and the temperature of each group."""
    return [group.tokens for group in groups], [group.temperature for group in groups]


def _sampled(values: Float[Tensor, " C"], loss_mask: Bool[np.ndarray, " C"] | None) -> Float[Tensor, " S"]:
    """Those of the S tokens that the policy sampled: the others say nothing of its KL."""
    return values if loss_mask is None else values[torch.tensor(loss_mask, device=values.device)]


def _sum(values: Tensor) -> float:
    return float(values.to(widest_float(values.device)).sum())
