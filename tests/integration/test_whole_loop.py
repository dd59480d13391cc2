"""The three processes together: the reward rises, with our problems and with a user's own."""

import json

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from policy_trainer.demo.base_model import make_tokenizer
from shared.models import save_model
from tests.integration.processes import Process, Server, processes_of, steps_of, until
from tests.integration.runs import QUICK, assert_trained_exactly_once, train


def test_reward_rises(base_model, tmp_path, start):
    server = start(Server(base_model, tmp_path, None, "--queue.max-batches", "32"))
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


def test_external_worker_waits_and_ends_with_the_run(random_model, tmp_path, start):
    run_dir = tmp_path / "external"
    server = Server(random_model, tmp_path)  # still loading when the trainer starts
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "3", "--rollout", "external"))
    start(server)
    until(lambda: "policy-trainer rollout --config" in trainer.output(), "the trainer to say what it needs", trainer)
    workers = [
        start(
            Process(
                "policy_trainer", "rollout", "--config", str(run_dir / "config.toml"), "--worker", str(k),
                "--workers", "2", log=tmp_path / f"worker-{k}.log",
            )
        )
        for k in (0, 1)
    ]  # fmt: skip
    assert trainer.wait() == 0, trainer.output()
    for worker in workers:
        assert worker.wait() == 0, worker.output()
        assert "the run is finished" in worker.output()
    assert_trained_exactly_once(server, run_dir)


def test_a_policy_with_another_vocabulary_than_the_reference_is_refused(random_model, tmp_path, start):
    other = tmp_path / "other"
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    save_model(tiny_llama(len(tokenizer)), tokenizer, other)
    server = start(Server(random_model, tmp_path))
    trainer = start(train(other, server, tmp_path / "refused", *QUICK))
    assert trainer.wait() == 2
    assert "vocabulary of 266 tokens" in trainer.output()
    assert "Traceback" not in trainer.output()


def test_groups_that_the_server_would_refuse_are_refused_at_the_start(random_model, tmp_path, start):
    """Otherwise a run would only train on its short groups. 256 tokens of context leave 244 for a prompt."""
    server = start(Server(random_model, tmp_path, None, "--max-batch-tokens", str(244 + 4 * 12 - 1)))
    trainer = start(train(random_model, server, tmp_path / "refused", *QUICK))
    assert trainer.wait() == 2, trainer.output()
    assert "ref-server serve --max-batch-tokens 292" in trainer.output()
    assert "Traceback" not in trainer.output()


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
    data = tmp_path / "own.jsonl"
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
            "--data.system-prompt", "",
        )
    )  # fmt: skip
    assert trainer.wait() == 0, trainer.output()
    # 27 problems are not held out, one of them too long: eight steps of four go past it.
    assert sum(record["dropped_prompts"] for record in steps_of(run_dir)) >= 1


def test_loss_that_stays_not_finite_stops_the_run(base_model, tmp_path, start):
    server = start(Server(base_model, tmp_path, None, "--queue.max-batches", "16"))
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
