"""Plans of runs: which process is where, what does not fit, and what to do then."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import TrainConfig
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.reporting.display import Display
from policy_trainer.trainer.plan import MAIN_MEMORY, Need, Planner, Shortage, _Step
from policy_trainer.trainer.policy import load_reward_scorer, warn_of_memory
from shared.errors import UserError
from shared.settings import from_values
from tests.tiny_models import make_tiny

GIB = 2**30


@pytest.fixture(scope="module")
def outline() -> PreTrainedModel:
    """Qwen2.5-7B, without weights."""
    config = Qwen2Config(
        num_hidden_layers=28,
        hidden_size=3584,
        intermediate_size=18_944,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152_064,
        tie_word_embeddings=False,
        max_position_embeddings=32_768,
    )
    with torch.device("meta"):
        return Qwen2ForCausalLM(config)


def run(**settings: object) -> TrainConfig:
    return from_values(TrainConfig, **{"model": "m", "dtype": "bfloat16", **settings})


def plan(config: TrainConfig, outline: PreTrainedModel, gpu_bytes: int | None, **more: Any) -> list[Need]:
    return Planner(outline, gpu_bytes, **more).needs(config)


def short(config: TrainConfig, outline: PreTrainedModel, gpu_bytes: int | None, **more: Any) -> list[Shortage]:
    return Planner(outline, gpu_bytes, **more).shortages(config)


def test_one_gpu_holds_all_three_processes(outline: PreTrainedModel) -> None:
    needs = plan(run(), outline, 80 * GIB)
    places = [(need.process, need.memory) for need in needs]
    assert places == [
        ("trainer", "cuda:0"), ("trainer", MAIN_MEMORY), ("reference server", "cuda:0"), ("worker", "cuda:0"),
    ]  # fmt: skip
    trainer, _, reference, worker = needs
    assert (
        trainer.parts["weights"] == reference.parts["weights"] == worker.parts["weights"] == pytest.approx(15.2e9, 0.01)
    )
    assert trainer.parts["masters"] + trainer.parts["gradients"] + trainer.parts["AdamW"] == pytest.approx(122e9, 0.01)
    (shortage,) = short(run(), outline, 80 * GIB)
    assert (shortage.memory, shortage.size) == ("cuda:0", 80 * GIB)
    assert shortage.needed == trainer.total + reference.total + worker.total


def test_its_remedies_suffice(outline: PreTrainedModel) -> None:
    """Each that the run does not use yet is named; with them it fits."""
    first = str(short(run(), outline, 80 * GIB)[0])
    for remedy in ("--gradient-checkpointing", "--optimizer.offload cpu", "--reference.device", "--rollout external"):
        assert remedy in first
    assert "--dtype bfloat16" not in first
    better = run(gradient_checkpointing=True, optimizer={"offload": "cpu"})
    needs = plan(better, outline, 80 * GIB)
    assert not short(better, outline, 80 * GIB)
    assert next(need for need in needs if need.memory == MAIN_MEMORY).total == pytest.approx(137e9, 0.01)
    (shortage,) = short(better, outline, 48 * GIB)
    assert "offload" not in str(shortage) and "checkpointing" not in str(shortage)


def test_only_adapters_have_gradients_and_moments(outline: PreTrainedModel) -> None:
    """Rank 16 for seven matrices in each of 28 layers: 40.4 million parameters, of 4 + 4 + 8 bytes."""
    config = run(lora={"rank": 16}, reference={"source": "adapter-off"}, gradient_checkpointing=True)
    needs = plan(config, outline, 80 * GIB)
    assert [need.process for need in needs] == ["trainer", "trainer", "worker"]
    trainer, host, _ = needs
    assert trainer.parts["weights"] == pytest.approx(15.2e9 + 2 * 40.4e6, 0.01)
    trained = trainer.parts["masters"] + trainer.parts["gradients"] + trainer.parts["AdamW"]
    assert trained == 16 * 40_370_176 and host.total == 2 * 40_370_176
    remedies = str(short(config, outline, 20 * GIB)[0])
    assert "--lora.rank" not in remedies and "--lora.load-in-4bit" in remedies
    served = plan(run(lora={"rank": 16}), outline, 80 * GIB)
    assert [need.process for need in served] == ["trainer", "trainer", "reference server", "worker"]
    assert "--reference.source adapter-off" in str(short(run(lora={"rank": 16}), outline, 20 * GIB)[0])
    assert "--lora.rank 16" in str(short(run(), outline, 80 * GIB)[0])


def test_weights_in_4_bits(outline: PreTrainedModel) -> None:
    """Of 7.6 billion parameters 1.1 are the embedding and the head, which stay in bfloat16."""
    config = run(lora={"rank": 16, "load_in_4bit": True}, gradient_checkpointing=True)
    needs = plan(config, outline, 80 * GIB)
    assert [need.process for need in needs] == ["trainer", "trainer", "worker"]
    trainer, host, worker = needs
    assert worker.parts["weights"] == pytest.approx(2 * 1.09e9 + 0.516 * 6.53e9, 0.01)
    assert trainer.parts["weights"] - worker.parts["weights"] == 2 * 40_370_176 == host.total
    assert trainer.parts["a dequantised matrix"] == 2 * 3584 * 18944
    assert "--lora" not in str(short(config, outline, 10 * GIB)[0])
    with pytest.raises(UserError, match=r"^lora\.load_in_4bit: under torchrun"):
        plan(config, outline, 80 * GIB, ranks=2)


def test_processes_on_other_devices(outline: PreTrainedModel) -> None:
    config = run(device="cuda:1", reference={"device": "cuda:0"}, rollout="external")
    places = {need.process: need.memory for need in plan(config, outline, 80 * GIB) if need.memory != MAIN_MEMORY}
    assert places == {"trainer": "cuda:1", "reference server": "cuda:0", "worker": "each worker's device"}
    remote = run(server="http://far:8400", sampler="vllm-server", vllm_url="http://near:8000")
    places = {need.process: need.memory for need in plan(remote, outline, 80 * GIB) if need.memory != MAIN_MEMORY}
    assert places == {"trainer": "cuda:0", "reference server": "at http://far:8400"}


def test_ranks_divide_the_trainer(outline: PreTrainedModel) -> None:
    config = run(gradient_checkpointing=True, micro_batch_tokens=100_000, groups_per_step=32)
    rank, published, *others = plan(config, outline, 80 * GIB, ranks=8)
    assert (rank.process, rank.memory, published.process) == ("trainer, each of 8 ranks", "cuda:0", "trainer, rank 0")
    assert rank.parts["weights"] + rank.parts["gradients"] + rank.parts["AdamW"] == pytest.approx(16 * 7.6e9 / 8, 0.01)
    assert "gradients of several micro-batches" not in rank.parts and "sends and receives" in rank.limit
    assert others == plan(config, outline, 80 * GIB)[2:]
    (shortage,) = short(config, outline, 40 * GIB, ranks=8)
    assert "more ranks under torchrun" in str(shortage) and "offload" not in str(shortage)
    several = config.model_copy(update={"micro_batch_tokens": 1})
    assert plan(several, outline, 80 * GIB, ranks=8)[0].parts["gradients of several micro-batches"] > 30e9


def test_what_ranks_cannot_do_is_refused(outline: PreTrainedModel) -> None:
    with pytest.raises(UserError, match="the ranks divide the optimizer's memory"):
        plan(run(optimizer={"offload": "cpu"}), outline, 80 * GIB, ranks=2)


@pytest.mark.parametrize(("beta", "weights"), [(0.0, 1), (0.1, 2)])
def test_the_teacher_scores_with_or_without_a_reference(outline: PreTrainedModel, beta: float, weights: int) -> None:
    config = run(teacher="t", loss={"advantage": "distill", "beta": beta})
    reference = next(need for need in plan(run(), outline, 80 * GIB) if need.process == "reference server")
    needs = plan(config, outline, 80 * GIB, teacher=outline)
    served = next(need for need in needs if need.process == "reference server")
    assert served.parts["weights"] == weights * reference.parts["weights"]
    assert served.parts["activations"] == reference.parts["activations"], "one scores after the other"
    named = run(server="http://far:8400", loss={"advantage": "distill", "beta": 0})
    for without in (named, run(loss={"beta": 0})):
        assert "reference server" not in {need.process for need in plan(without, outline, 80 * GIB)}


def test_a_device_that_is_not_here_is_left_to_the_process_that_runs_there(outline: PreTrainedModel) -> None:
    config = run(device="cpu", reference={"device": "cuda:77"})
    needs = plan(config, outline, None)
    assert "cuda:77" in {need.memory for need in needs}
    assert "cuda:77" not in {shortage.memory for shortage in short(config, outline, None)}


@pytest.mark.parametrize(("asleep", "share"), [(False, 0.3), (True, 0.0)])
def test_vllm_takes_its_share_unless_it_sleeps(outline: PreTrainedModel, asleep: bool, share: float) -> None:
    config = run(sampler="vllm", vllm={"enable_sleep_mode": asleep})
    worker = plan(config, outline, 80 * GIB)[-1]
    assert worker.parts == {"vLLM": int(share * 80 * GIB)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_warns_before_anything_is_loaded(
    outline: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    """The directory has a configuration and no weights. 70B are more than this machine has."""
    large = copy.deepcopy(outline.config)
    large.update({"num_hidden_layers": 300})
    large.layer_types = None
    large.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = run(model=str(tmp_path), device="cpu", task="arithmetic")
    task = make_task(config)
    judge = load_reward_scorer(config, task, None)
    warn_of_memory(config, task, None, judge, Display(Console(), 1, 0), ranks=ranks)
    output = " ".join(capsys.readouterr().out.split())
    assert "this may run out of memory: main memory has" in output and "--reference.device" not in output


def test_prompts_are_as_long_as_measured(outline: PreTrainedModel) -> None:
    """2 groups of 8 completions of 100 tokens: 2 x 1,824 tokens with the prompts' limit, 2 x 900 with 100 of them."""
    config = run(groups_per_step=2, sampling={"max_completion_length": 100}, gradient_checkpointing=True, device="cpu")
    most, measured, beyond = (plan(config, outline, None, prompt=prompt)[0].parts for prompt in (None, 100, 10**6))
    assert beyond == most
    assert measured["activations"] < 0.6 * most["activations"]
    assert {name: most[name] for name in most if name != "activations"}.items() <= measured.items()


def test_remedies_say_what_they_leave(outline: PreTrainedModel) -> None:
    """The first helps most, and what the reader is told is what the plan of that run says."""
    config = run(groups_per_step=8)
    (shortage,) = short(config, outline, 240 * GIB)
    values = [float(each) for each in re.findall(r"then about ([0-9.]+) GB", str(shortage))]
    assert values == sorted(values) and len(values) >= 4
    tokens = int(re.search(r"--micro-batch-tokens (\d+)", str(shortage))[1])  # type: ignore[index]
    assert f"--micro-batch-tokens {tokens} (then about" in str(shortage)
    assert not short(run(groups_per_step=8, micro_batch_tokens=tokens), outline, 240 * GIB)
    assert short(run(groups_per_step=8, micro_batch_tokens=2 * tokens), outline, 240 * GIB)


def test_padded_rows_repeat_their_prompt() -> None:
    """A model whose configuration excludes the packed form."""
    config = run(sampling={"max_completion_length": 20})
    tokens = [_Step.of(config, make_tiny(name), 50).forward(1, "cpu").tokens for name in ("llama", "mpt")]
    assert tokens == [50 + 8 * 20, 8 * (50 + 20)]
