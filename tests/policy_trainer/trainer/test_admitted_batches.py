"""No batch that the server admits ends a run, however odd: somebody who may upload must not stop the trainer."""

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from policy_trainer.config import LossConfig, OptimizerConfig, SamplesConfig
from policy_trainer.reporting.display import Display, LiveDisplay
from policy_trainer.reporting.first_steps import FirstSteps
from policy_trainer.reporting.health import Health, health_record
from policy_trainer.reporting.metrics import MetricsFile, next_index, read_metrics
from policy_trainer.reporting.sample_views import columns_and_rows, markdown, print_best_and_worst
from policy_trainer.reporting.samples import Samples, append_samples, read_samples
from policy_trainer.trainer.parts import step_record
from policy_trainer.trainer.queue_client.server import trained_advantages
from policy_trainer.trainer.queue_client.terms import BatchCheck
from shared import wire
from shared.batch import (
    MAX_INDEX,
    MAX_LOGP,
    MAX_REWARD,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Batch,
    BatchError,
    StepRewards,
    TokenGroup,
    Training,
)
from shared.client import Leased
from tests.policy_trainer.learner.steps import make_learner

ODD_NAMES = ["[red]", "[/]", "KL", "accuracy", "/", "a/b", "__proto__", "<b>", "%s{}"]
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20) | st.sampled_from(ODD_NAMES)
NUMBERS = st.floats(-MAX_REWARD, MAX_REWARD, width=32) | st.sampled_from([-0.0, math.nan, MAX_REWARD, 2.0**-149])
LOWEST = float(np.finfo(np.float32).min)
LOGPS = st.floats(LOWEST, 0, width=32) | st.sampled_from([LOWEST, MAX_LOGP, 0.0, -(2.0**-149)])
KNOWN = (
    "answer",
    "start",
    "sampling_seconds",
    "judging_seconds",
    "waiting_seconds",
    "dropped_prompts",
    "resampled_tokens",
    "resampled_groups",
    "probe_logp_difference",
    "probe_logp_difference_max",
    "worker",
)
SCALARS = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=9) | NAMES
ANY_JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
SAMPLES = ANY_JSON | st.dictionaries(st.sampled_from(KNOWN), ANY_JSON)
LOSSES = (
    {},
    {"beta": 0.1, "kl_in": "both"},
    {"beta": 0.1, "kl": "k1"},
    {"advantage": "process"},
    {"advantage": "rloo"},
    {"advantage": "reinforce++", "kl_in": "reward"},
    {"advantage": "dr_grpo", "aggregation": "constant"},
    {"scale_rewards": "batch"},
    {"importance_sampling_level": "sequence"},
    {"aggregation": "luspo"},
    {"surrogate": "cispo", "truncated": "mask"},
    {"surrogate": "sapo", "truncated": "drop"},
    {"surrogate": "vespo", "aggregation": "token_mean"},
    {"old_logps": "recomputed", "importance_sampling_correction": "tis"},
    {"old_logps": "recomputed", "importance_sampling_correction": "mask"},
    {"old_logps": "log_linear"},
    {"surrogate": "reinforce", "beta": 0.1, "kl_weight": "ratio"},
    {"drop_zero_variance": False},
)


def floats(draw: Any, numbers: Any, count: int) -> np.ndarray:
    return np.array(draw(st.lists(numbers, min_size=int(count), max_size=int(count))), np.float32)


@st.composite
def admitted(draw: Any) -> Leased:
    """A batch that was encoded and decoded, as a lease of it is; hypothesis tries another where it is refused."""
    lengths = np.array(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    size, tokens = len(lengths), int(lengths.sum())
    ids = st.integers(0, 25)
    version = draw(st.integers(0, 5))
    newer = st.integers(version, 2**63 - 1)
    versions = st.lists(newer, min_size=size, max_size=size).map(lambda rest: np.array([version, *rest[1:]]))
    counts = np.array(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
    steps = StepRewards(rewards=floats(draw, NUMBERS, counts.sum()), ends=lengths[counts > 0] - 1, counts=counts)
    try:
        rollout = Batch(
            id=str(UUID(int=(7 << 76) | (2 << 62) | draw(st.integers(0, 2**30)))),
            run=draw(NAMES.filter(bool)),
            epoch=draw(st.integers(0, 2**63 - 1)),
            policy_version=version,
            temperature=draw(st.floats(MIN_TEMPERATURE, MAX_TEMPERATURE)),
            group=TokenGroup(
                np.array(draw(st.lists(ids, min_size=1, max_size=5))),
                np.array(draw(st.lists(ids, min_size=tokens, max_size=tokens))),
                lengths,
            ),
            rewards=floats(draw, NUMBERS, size),
            finished=np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size))),
            sampler_logps=draw(st.none() | st.just(floats(draw, LOGPS, tokens))),
            loss_mask=draw(st.none() | st.lists(st.booleans(), min_size=tokens, max_size=tokens).map(np.array)),
            policy_versions=draw(st.none() | versions),
            reward_parts={name: floats(draw, NUMBERS, size) for name in draw(st.lists(NAMES, max_size=4))},
            steps=draw(st.none() | st.just(steps)),
            top_p=draw(st.none() | st.floats(0, 1, exclude_min=True)),
            top_k=draw(st.none() | st.integers(0, 2**63 - 1)),
            task=draw(st.none() | NAMES),
            index=draw(st.none() | st.integers(0, MAX_INDEX)),
            sample=draw(st.none() | SAMPLES.map(json.dumps)),
        )
        scores = {"ref_logps": floats(draw, LOGPS, tokens), "reference_version": str(draw(st.integers(0, 2**63)))}
        return Leased(
            wire.decode(wire.encode(replace(rollout, **scores))), rollout.id, "token", draw(st.integers(1, 5))
        )
    except BatchError:
        return draw(st.nothing())


@pytest.fixture
def trainer(tmp_path: Path, make_tiny: Any, tokenizer: Any) -> Iterator[Any]:
    """Everything that a step of a training run passes a batch to, once for each loss."""
    model = make_tiny(vocabulary=len(tokenizer))
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), force_terminal=True)
    writers = [partial(append_samples, tmp_path / "samples.jsonl"), partial(print_best_and_worst, console)]
    losses = [LossConfig.model_validate(loss) for loss in LOSSES]
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    yield SimpleNamespace(
        learners=[
            (
                loss,
                make_learner(
                    model,
                    loss=loss,
                    optimizer=OptimizerConfig(learning_rate=1e-9),
                    micro_batch_tokens=20,
                    num_iterations=2,
                ),
            )
            for loss in losses
        ],
        vocabulary=len(tokenizer),
        metrics=metrics,
        samples=Samples(SamplesConfig(every=1), writers, lambda ids: str(tokenizer.decode(ids)), {1}),
        displays=[Display(console, 9, 0), LiveDisplay(console, 9, 0)],
        first_steps=lambda loss: FirstSteps(2, tokenizer, frozenset(), loss),
        console=console,
    )
    metrics.close()


@pytest.mark.slow
@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(leased=st.lists(admitted(), min_size=1, max_size=3), which=st.integers(0, len(LOSSES) - 1))
def test_a_step_and_its_reports_survive(trainer: Any, tmp_path: Path, leased: list[Leased], which: int) -> None:
    loss, learner = trainer.learners[which]
    intake = BatchCheck(loss, trainer.vocabulary, 128)
    leased = [lease for lease in leased if intake.refusal(lease.batch) is None]
    if not leased:
        return
    batches, groups = [lease.batch for lease in leased], []
    learner.noise_floor(batches)
    learner.kl(batches)
    learner.probe(batches)
    stats = learner.step(batches, step=5, on_groups=groups.extend)
    assert all(weights.isfinite().all() for weights in learner.model.parameters())
    record = step_record(leased, groups, stats, 6)
    json.dumps(next_index(leased))
    for display in trainer.displays:
        display.step(record | {"tokens_per_second": 1.0})
    trainer.console.print(trainer.displays[1]._render())
    rollouts = [lease.batch for lease in leased]
    trainer.metrics.write(record)
    for trouble in (*trainer.first_steps(loss).observe(1, rollouts), *Health(loss).observe(record)):
        trainer.metrics.write(health_record(trouble, 6))
        trainer.displays[0].note(f"{trouble}")
    sampled = trainer.samples.of_step(1, rollouts, groups)
    for (_, group), logps in zip(sampled, learner.logps([rollout for rollout, _ in sampled]), strict=True):
        Training(6, trained_advantages(group), logps)
    json.loads(json.dumps(read_metrics(tmp_path / "metrics.jsonl")[-1], allow_nan=False))
    shown = read_samples(tmp_path / "samples.jsonl")[-len(sampled) :]
    assert [group.batch for group in shown] == [rollout.id for rollout, _ in sampled]
    markdown(shown)
    columns_and_rows(shown)
