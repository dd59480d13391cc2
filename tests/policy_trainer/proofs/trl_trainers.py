"""TRL's own trainers as functions: made without their `__init__`, so that neither a model nor a data set is needed.

What runs is TRL's code from rewards to loss: `_generate_and_score_completions` (advantages, importance weights of the
sampler, masks of truncated completions) and `_compute_loss`. Replaced are generation and the forward pass: these hand
out the log-probs of a case. `Trl.of_model` keeps the forward pass too.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.policy_trainer.proofs.formulas import TOKEN_VALUES, gradient_of
from tests.policy_trainer.proofs.oracle import Completion

EOS, PAD, WORD = 1, 0, 5
# TRL's defaults, but for those that need what is not here.
_DEFAULTS: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 3.0,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "_last_world_entropy": math.inf,
    "_entropy_window_stats": None,
    "normalize_advantages": False,
    "reward_clip_range": None,
    "max_completion_length": 512,
    "has_old": True,
}
_ARGUMENTS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "entropy_target": 0.2,
    "entropy_coef_delta": 0.005,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
}


class Trl:
    """One trainer of TRL with these settings, whose batch is all groups at once."""

    def __init__(self, trainer: str = "GRPOTrainer", **settings: Any) -> None:
        self._settings = {**_DEFAULTS, **{name: value for name, value in settings.items() if name not in _ARGUMENTS}}
        self._arguments = {**_ARGUMENTS, **{name: value for name, value in settings.items() if name in _ARGUMENTS}}
        module = {"GRPOTrainer": "grpo_trainer", "RLOOTrainer": "rloo_trainer"}[trainer]
        self._class = getattr(import_module(f"trl.trainer.{module}"), trainer)

    @property
    def entropy_coef(self) -> float:
        """After the latest step."""
        return self._settings["entropy_coef"]

    def loss(
        self,
        groups: Sequence[Sequence[Completion]],
        *,
        parts: Tensor | None = None,
        weights: Sequence[float] = (1.0,),
        micro_batches: int = 1,
    ) -> tuple[float, list[float]]:
        """Loss of an optimizer step, and its gradient to each of the completions' log-probs and entropies. Groups are
        of one size. The next step goes on with the entropy's coefficient.

        parts: (B, R) rewards of each completion by each of R functions, weighted by `weights`.
        """
        rows = [completion for group in groups for completion in group]
        rewards = torch.tensor([[row.reward] for row in rows]) if parts is None else parts
        leaves = [
            torch.tensor([float(element) for row in rows for element in values(row)]).requires_grad_()
            for values in TOKEN_VALUES
        ]
        trainer = self._trainer(rows, rewards, weights, leaves, size=len(groups[0]), accumulated=micro_batches)
        inputs = trainer._generate_and_score_completions([{"prompt": "x"} for _ in rows])
        total = torch.zeros(())
        for trainer.requested in _parts(len(rows), micro_batches):
            total = total + trainer._compute_loss(trainer.model, _of(inputs, trainer.requested))
        total.backward()
        self._settings.update({name: vars(trainer)[name] for name in ("entropy_coef", "_last_world_entropy")})
        return total.item(), torch.cat([gradient_of(leaf) for leaf in leaves]).tolist()

    def of_model(self, model: Any, rows: int, accumulated: int = 1) -> Any:
        """A trainer that can compute the loss of this model on so many rows, in so many micro-batches."""
        trainer = object.__new__(self._class)
        vars(trainer).update(
            self._settings,
            args=SimpleNamespace(
                per_device_train_batch_size=rows,
                steps_per_generation=accumulated,
                gradient_accumulation_steps=accumulated,
                gradient_checkpointing_kwargs=None,
                report_to=[],
                **self._arguments,
            ),
            num_iterations=2 if self._settings["has_old"] else 1,  # with two, old log-probs are computed
            current_gradient_accumulation_steps=accumulated,
            accelerator=_OneProcess(),
            state=SimpleNamespace(global_step=0),
            model=model,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=bool(self._settings["entropy_coef"]) or self._settings["use_adaptive_entropy"],
            _metrics=defaultdict(lambda: defaultdict(list)),
        )
        return trainer

    def _trainer(
        self,
        rows: list[Completion],
        rewards: Tensor,
        weights: Sequence[float],
        leaves: list[Tensor],
        *,
        size: int,
        accumulated: int,
    ) -> Any:
        names = [f"reward {place}" for place in range(rewards.shape[1])]
        lengths = [len(row.logps) for row in rows]
        policy, reference = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in range(2))
        trainer = self.of_model(policy, len(rows), accumulated)
        vars(trainer).update(
            ref_model=reference,
            requested=None,  # which rows of the policy; before that, those of the policy as it was
            num_generations=size,
            reward_funcs=names,
            reward_func_names=names,
            reward_weights=torch.tensor(weights),
            environment_factories=None,
            environments=None,
            tools=[],
            _is_vlm=False,
            _tokenizer=SimpleNamespace(pad_token_id=PAD),
            eos_token_ids=[EOS],
            pad_to_multiple_of=None,
            log_multimodal=False,
            _logs=defaultdict(deque, rewards=defaultdict(deque), extra=defaultdict(deque)),
            _pending_extra_logs={},
            _pending_metrics={},
        )
        now, entropies = (_padded(leaf.split(lengths)) for leaf in leaves)
        old, referred = (_padded([torch.tensor(getattr(row, name)) for row in rows]) for name in ("old", "reference"))

        def logps_of(model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
            policys = old if trainer.requested is None else now[trainer.requested]
            logps = referred if model is reference else policys
            return logps, torch.zeros_like(logps) if trainer.requested is None else entropies[trainer.requested], None

        trainer._get_per_token_logps_and_entropies = logps_of
        trainer._generate = lambda prompts: _generated(rows, self._class.__name__)
        trainer._calculate_rewards = lambda *_: rewards
        return trainer


class _OneProcess:
    """An accelerator of one process."""

    device = torch.device("cpu")
    num_processes, process_index, is_main_process, sync_gradients = 1, 0, True, True

    def autocast(self) -> nullcontext[None]:
        return nullcontext()

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values

    def pad_across_processes(self, values: Tensor, dim: int, pad_index: float) -> Tensor:
        return values


def _parts(count: int, parts: int) -> list[slice]:
    """Consecutive rows of equal number."""
    return [slice(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


def _of(inputs: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: value[rows] if value.dim() else value for name, value in inputs.items()}


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _generated(rows: list[Completion], trainer: str) -> tuple[Any, ...]:
    """What `_generate` returns: token ids of which the last says whether a completion ended by itself."""
    ids = [[WORD] * (len(row.logps) - 1) + [EOS if row.finished else WORD] for row in rows]
    masks = [[int(trained) for trained in row.mask] for row in rows]
    prompts = [[WORD]] * len(rows)
    if trainer == "GRPOTrainer":
        return prompts, ids, masks, [""] * len(rows), [row.sampler for row in rows], {}, None, None
    return prompts, ids, [""] * len(rows)
