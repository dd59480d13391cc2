"""Whole runs: with our problems and a user's, without a reference model, in bfloat16, and with adapters."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from policy_trainer.cli.demo.base_model import make_tokenizer
from shared.api import State
from shared.client import RefServerClient
from shared.models import is_adapter, load_model, load_tokenizer, save_model
from tests.harness.processes import Process, processes_of, until
from tests.harness.runs import QUICK, assert_trained_exactly_once, steps_of, train
from tests.harness.server import Server


def test_reward_rises(base_model, tmp_path, start):
    server = start(Server(base_model, tmp_path, "--queue.max-batches", "32"))
    run_dir = tmp_path / "rises"
    trainer = start(
        train(
            base_model, server, run_dir, "--threads", "1", "--max-steps", "40", "--sampling.prompts-per-round", "16",
            "--groups-per-step", "16", "--sampling.max-completion-length", "40", "--publish-every", "4",
            "--optimizer.learning-rate", "3e-4", "--optimizer.warmup-steps", "10", "--checkpoint.save-steps", "20",
            "--evaluation.eval-steps", "20", "--evaluation.problems", "128",
        )
    )  # fmt: skip
    assert trainer.wait() == 0, trainer.output()
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == list(range(1, 41))
    assert steps[0]["kl_at_step_0"] < 1e-9
    first, last = (sum(record["reward"] for record in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.3, (first, last)
    assert_trained_exactly_once(server, run_dir)
    AutoModelForCausalLM.from_pretrained(run_dir / "model")
    AutoTokenizer.from_pretrained(run_dir / "model")
    # The saved model, evaluated with the run's settings.
    evaluation = Process(
        "policy_trainer", "eval", "--model", str(run_dir / "model"), "--config", str(run_dir / "config.toml"),
        "--evaluation.problems", "128", log=tmp_path / "eval.log",
    )  # fmt: skip
    assert start(evaluation).wait() == 0, evaluation.output()
    output = evaluation.output()
    measured = json.loads(output[output.index("{") : output.rindex("}") + 1])["evaluations"][0]
    assert 0.5 < measured["low"] < measured["accuracy"] <= measured["high"] <= 1
    assert not processes_of(run_dir)


def tiny_llama(vocabulary: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def test_own_data_with_another_architecture(tmp_path, start):
    model = tmp_path / "llama"
    tokenizer = make_tokenizer()
    save_model(tiny_llama(len(tokenizer)), tokenizer, model)
    data, template = tmp_path / "own.jsonl", tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}<|user|>Tell me: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    questions = ["too long " * 40 if i == 5 else f"What is {i} doubled?" for i in range(30)]
    prompts = [
        {"prompt": q} if i % 2 else {"messages": [{"role": "user", "content": q}]} for i, q in enumerate(questions)
    ]
    data.write_text("".join(json.dumps({**p, "answer": 2 * i}) + "\n" for i, p in enumerate(prompts)))
    server = start(Server(model, tmp_path))
    run_dir = tmp_path / "own"
    trainer = start(
        train(
            model, server, run_dir, *QUICK, "--max-steps", "8", "--task", "jsonl", "--data.path", str(data),
            "--data.answer-rule", "number", "--data.max-prompt-length", "64", "--sampling.stop", "</answer>",
            "--data.system-prompt", "", "--data.chat-template", str(template), "--samples.every", "1",
        )
    )  # fmt: skip
    assert trainer.wait() == 0, trainer.output()
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    prompts = [sample["prompt"] for sample in samples if sample["kind"] == "train"]
    assert prompts and all(prompt.startswith("Tell me: What is") for prompt in prompts)
    assert load_tokenizer(str(run_dir / "model")).chat_template == template.read_text()
    # 27 problems are not held out, one of them too long: eight steps of four go past it.
    assert sum(record["dropped_prompts"] for record in steps_of(run_dir)) >= 1


def test_loss_that_stays_not_finite_stops_the_run(base_model, tmp_path, start):
    server = start(Server(base_model, tmp_path, "--queue.max-batches", "16"))
    run_dir = tmp_path / "broken"
    # The first step makes the weights useless; they are not published, so that the worker continues to sample.
    trainer = start(
        train(
            base_model, server, run_dir, *QUICK, "--max-steps", "50", "--optimizer.learning-rate", "1e30",
            "--publish-every", "100", "--checkpoint.save-steps", "100", "--max-bad-steps", "3",
        )
    )  # fmt: skip
    assert trainer.wait() == 1, trainer.output()
    assert "3 steps in a row had a loss or gradient that is not finite" in trainer.output()
    assert "Traceback" not in trainer.output()
    bad = [record["step"] for record in steps_of(run_dir) if record["not_finite"]]
    assert len(bad) == 3
    saved = {path.stem for path in (run_dir / "bad_batches").glob("*.safetensors")}
    assert saved == set(steps_of(run_dir)[-1]["batch_ids"])
    assert not (run_dir / "checkpoints").exists(), "a broken state must not be resumed"
    assert not processes_of(run_dir)


def test_it_trains_without_a_reference_model(random_model: Path, tmp_path: Path, start: Any) -> None:
    server, run_dir = start(Server(None, tmp_path)), tmp_path / "run"
    # A random model is wrong everywhere: only the lengths of its completions differ.
    options = ("--loss.beta", "0", "--max-steps", "4", "--rewards", "accuracy", "length")
    trainer = start(train(random_model, server, run_dir, *QUICK, *options))
    assert trainer.wait() == 0, trainer.output()
    steps = steps_of(run_dir)
    assert [record["groups"] for record in steps] == [4, 4, 4, 4]
    assert all(record["kl"] is None and record["updates"] == 1 for record in steps)
    assert all(record["reference_version_max"] is None for record in steps)
    assert any(record["grad_norm"] > 0 for record in steps)
    with RefServerClient(server.url) as client:
        done = {batch.id for batch in client.batches(State.DONE)}
        assert done == {id for record in steps for id in record["batch_ids"]}
        states = [[event.state for event in client.batch(id).history] for id in done]
        assert all(State.SCORING not in of_one and of_one[-1] == State.DONE for of_one in states)
        assert client.queue().scoring.batches == 0
    assert server.get("/v1/model")["name"] is None


MIXED = (*QUICK, "--dtype", "bfloat16", "--gradient-checkpointing", "--checkpoint.save-total-limit", "3")


@pytest.mark.long
def test_a_bfloat16_run_keeps_its_float32_masters_over_a_resume(base_model, tmp_path, start):
    server = start(Server(base_model, tmp_path, "--dtype", "bfloat16"))
    run_dir = tmp_path / "mixed"
    for steps in ("3", "6"):
        trainer = start(train(base_model, server, run_dir, *MIXED, "--max-steps", steps, "--resume"))
        assert trainer.wait() == 0, trainer.output()
    records = steps_of(run_dir)
    assert [record["step"] for record in records] == list(range(1, 7))
    assert records[0]["kl_at_step_0"] < 1e-2
    assert all(0 <= record["kl_noise_floor"] < 1e-2 and record["entropy"] > 0 for record in records)
    model = safetensors.torch.load_file(run_dir / "model" / "model.safetensors")
    early, late = (
        safetensors.torch.load_file(run_dir / "checkpoints" / f"step-{step:08d}" / "masters" / "weights.safetensors")
        for step in (3, 6)
    )
    assert all(not torch.equal(late[name], early[name]) for name in late)
    assert late.keys() == model.keys()
    for name, master in late.items():
        assert (master.dtype, model[name].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(master.bfloat16(), model[name])
    assert_trained_exactly_once(server, run_dir)


STEPS = 16


@pytest.mark.long
@pytest.mark.parametrize("quantised", [False, True])
def test_one_command_killed_and_resumed(quantised: bool, random_model: Path, tmp_path: Path, start: Any) -> None:
    server, place = start(Server(None, tmp_path)), tmp_path / "run"
    base_options = ("--lora.load-in-4bit",) if quantised else ("--reference.source", "adapter-off")
    command = (
        "policy_trainer", "train", "--model", str(random_model), "--server", server.url, "--run-dir", str(place),
        *QUICK, "--device", "cpu", "--max-steps", str(STEPS), "--lora.rank", "4", *base_options,
        "--rewards", "accuracy", "length", "--optimizer.learning-rate", "1e-2",
    )  # fmt: skip

    run = start(Process(*command, log=tmp_path / "first.log"))
    until((place / "checkpoints" / "step-00000005").exists, "the first checkpoint", run)
    run.popen.send_signal(signal.SIGKILL)
    run.popen.wait()
    assert is_adapter(place / "checkpoints" / "step-00000005")
    until(lambda: not processes_of(place), "its worker to end", run)
    changed = start(Process(*command, "--resume", "--lora.rank", "8", log=tmp_path / "changed.log"))
    assert changed.wait() == 2 and "lora.rank: 4 -> 8" in changed.output()

    if quantised:
        whole = start(Process(*command, "--resume", "--no-lora.load-in-4bit", log=tmp_path / "whole.log"))
        assert whole.wait() == 2 and "lora.load_in_4bit: true -> false" in whole.output()

    run = start(Process(*command, "--resume", log=tmp_path / "second.log"))
    assert run.wait() == 0, run.output()
    steps = steps_of(place)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert steps[0]["kl_at_step_0"] == steps[0]["kl"] == 0
    assert steps[-1]["kl"] > 0
    # Merged adapters round otherwise than the trainer's, and those over 4 bits are added as the trainer adds them.
    probed = [record["probe_logp_difference"] for record in steps if record["probe_logp_difference"] is not None]
    assert probed and max(probed) <= (0 if quantised else 1e-4)
    assert_trained_exactly_once(server, place)
    assert server.get("/v1/model")["name"] is None

    last = place / "checkpoints" / f"step-{STEPS:08d}"
    export = ("policy_trainer", "export", "--checkpoint", str(last), "--output", str(tmp_path / "exported"))
    exported = start(Process(*export, log=tmp_path / "export.log"))
    assert exported.wait() == 0, exported.output()
    base, whole, other = (weights(path) for path in (random_model, place / "model", tmp_path / "exported"))
    assert whole.keys() == base.keys() and any(not torch.equal(tensor, base[name]) for name, tensor in whole.items())
    for name, tensor in whole.items():
        assert torch.equal(tensor, other[name])
    adapters = safetensors.torch.load_file(last / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in adapters.values()) < 0.2 * sum(tensor.numel() for tensor in base.values())


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_model(str(directory), revision=None, device="cpu", dtype="auto").state_dict()
