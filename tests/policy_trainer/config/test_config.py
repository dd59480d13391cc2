"""Settings: what is impossible is refused with the name of its field, and what a run wrote reads back the same."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_settings import BaseSettings

from policy_trainer.cli.settings import FileSchema
from policy_trainer.config import (
    ColumnsConfig,
    DataConfig,
    DemoConfig,
    EvalConfig,
    EvalEvaluationConfig,
    EvaluationConfig,
    JudgingConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    RewardModelConfig,
    RolloutConfig,
    RolloutLossConfig,
    RunConfig,
    SamplesConfig,
    SamplingConfig,
    SftConfig,
    TrainConfig,
)
from policy_trainer.config.worker_settings import worker_settings
from policy_trainer.run_files.run_directory import RunDirectory
from shared.settings import load_settings

RENEWED = ["--reference.sync-steps", "5", "--reference.snapshot-root", "snapshots"]
THINKING = ["--data.chat-template-kwargs", '{"enable_thinking": false}']
RENORMALISED = ["--sampler", "vllm", "--sampling.top-p", "0.9"]
TOWER_ADAPTERS = ["--lora.rank", "8", "--no-freeze-vision-tower"]
QUANTISED = ["--lora.rank", "8", "--lora.load-in-4bit"]
ASLEEP = ["--sampler", "vllm", "--vllm.enable-sleep-mode"]
DISTILL = ["--loss.advantage", "distill", "--loss.beta", "0"]
TEACHES_ITSELF = ["--data.teacher-prompt-template", "{prompt} {privileged_context}"]
SINGLE = ["--sampling.num-generations", "1", "--loss.advantage", "reinforce++", "--loss.kl-in", "reward"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def load(cls: type[BaseSettings], *arguments: str) -> Any:
    schema = DemoConfig if cls is DemoConfig else FileSchema
    return load_settings(cls, list(arguments), prog="policy-trainer", schema=schema)


class TestRefusals:
    @pytest.mark.parametrize(
        ("cls", "arguments", "field"),
        [
            (
                TrainConfig,
                ["--dtype", "float16"],
                "dtype: gradients vanish in float16, which would need loss scaling: train",
            ),
            (TrainConfig, ["--task", "chess"], "task"),
            (TrainConfig, ["--task", "jsonl"], "data.path"),
            (TrainConfig, ["--rewards", "accuracy", "--reward-weights", "1", "2"], "reward_weights"),
            (TrainConfig, ["--rewards", "accuracy", "--reward-weights", "inf"], "reward_weights: numbers"),
            (TrainConfig, ["--server", "127.0.0.1:8400"], "server"),
            (TrainConfig, ["--loss.beta", "inf"], "loss.beta"),
            (TrainConfig, ["--loss.beta", "0", "--loss.kl-in", "reward"], "loss.kl_in: "),
            (TrainConfig, ["--tls-ca", "ca.pem"], "tls_ca: needs a server at https://"),
            (TrainConfig, ["--optimizer.betas", "0.9", "--optimizer.betas", "1.0"], "optimizer.betas: "),
            (TrainConfig, ["--optimizer.offload", "cpu", "--optimizer.master-weights", "none"], "optimizer.offload: "),
            (TrainConfig, ["--reference.sync-steps", "5", "--server", "http://h"], "reference.snapshot_root"),
            (TrainConfig, [*RENEWED, "--loss.beta", "0"], "reference.sync_steps"),
            (TrainConfig, [*RENEWED, "--lora.rank", "4"], "reference.sync_steps: with LoRA"),
            (TrainConfig, ["--reference.source", "adapter-off"], "reference.source: adapter-off is"),
            (TrainConfig, ["--lora.load-in-4bit"], "lora.load_in_4bit: 4-bit weights cannot be trained"),
            (TrainConfig, [*QUANTISED, "--sampler", "vllm"], "lora.load_in_4bit: vLLM would sample with"),
            (RolloutConfig, [*QUANTISED, "--sampler", "vllm"], "lora.load_in_4bit: vLLM would sample with"),
            (TrainConfig, [*QUANTISED, "--reference.source", "server"], "reference.source: with lora.load_in_4bit the"),
            (TrainConfig, [*QUANTISED, *RENEWED], "reference.sync_steps: with LoRA"),
            (TrainConfig, [*RENEWED, "--run", "my run"], "run: "),
            (TrainConfig, [*RENEWED, "--run", ".hidden"], "run: "),
            (TrainConfig, ["--sampling.num-generations", "1"], "sampling.num_generations"),
            (TrainConfig, [*SINGLE, "--loss.drop-zero-variance"], "sampling.num_generations"),
            (TrainConfig, [*SINGLE, "--sampling.max-resamples", "1"], "sampling.num_generations"),
            (TrainConfig, DISTILL, "teacher: distillation needs a model to learn from"),
            (TrainConfig, ["--teacher", "t"], "teacher: nothing would use it"),
            (TrainConfig, TEACHES_ITSELF, "data.teacher_prompt_template: no teacher would read it"),
            (
                TrainConfig,
                [*DISTILL, "--data.teacher-prompt-template", ""],
                "data.teacher_prompt_template: it must contain {prompt}; got ''",
            ),
            (
                TrainConfig,
                ["--data.teacher-prompt-template", "{prompt}"],
                "data.teacher_prompt_template: it must contain {privileged_context}",
            ),
            (
                TrainConfig,
                [*DISTILL, *TEACHES_ITSELF, "--environment", "m:E"],
                "data.teacher_prompt_template: an environment makes",
            ),
            (TrainConfig, [*DISTILL, "--teacher", "t", "--sampling.max-resamples", "1"], "sampling.max_resamples: the"),
            (TrainConfig, ["--minibatches", "9"], "minibatches"),
            (TrainConfig, ["--loss.advantage", "process"], "loss.advantage"),
            (RolloutConfig, ["--worker", "2", "--workers", "2"], "worker"),
            (RolloutConfig, ["--devices", "cuda:0", "cuda:1", "--workers", "1"], "worker"),
            (RolloutConfig, ["--devices", "cuda:0", "cuda:1", "--worker", "3", "--workers", "4"], "worker"),
            (EvalConfig, ["--sampling.stop", ""], "sampling.stop.0"),
            (TrainConfig, ["--max-steps", "0"], "max_steps"),
            (TrainConfig, ["--sampling.regroup", "1", "--sampling.max-resamples", "1"], "sampling.regroup: "),
            (TrainConfig, ["--loss.surrogate", "clipp"], "loss.surrogate: must be one of clip, reinforce, cispo, sapo"),
            (
                TrainConfig,
                ["--sampling.generation-kwargs", '{"presence_penalty": 1}'],
                "sampling.generation_kwargs: pr",
            ),
            (
                TrainConfig,
                ["--sampling.generation-kwargs", '{"do_sample": false}'],
                "sampling.generation_kwargs: do",
            ),
            (TrainConfig, ["--sampling.generation-kwargs", '{"seed": 1}'], "sampling.generation_kwargs: seed cannot"),
            (TrainConfig, ["--sampling.generation-kwargs", '{"min_q": 1}'], "sampling.generation_kwargs: min_q cannot"),
            (TrainConfig, ["--sampling.generation-kwargs", '{"top_p": 2}'], "sampling.top_p: Input should be less"),
            (TrainConfig, ["--tools", "search"], "tools: must be module:name, got 'search'"),
            (TrainConfig, ["--tools", "a:f", "b:f"], "tools: the model knows tools by name, and two are called f"),
            (TrainConfig, ["--tools", "a:f", "--judging.steps"], "tools: judging.steps"),
            (TrainConfig, ["--environment", "x=Chess"], "environment: must be module:name, got 'Chess'"),
            (TrainConfig, ["--environment", "a:Chess", "a:Go"], "environment: each of several has a name of its own"),
            (TrainConfig, ["--environment", "x=a:Chess", "x=a:Go"], "environment: each of several has a name"),
            (TrainConfig, ["--environment", "a:Chess", "--judging.steps"], "environment: judging.steps"),
            (TrainConfig, ["--environment", "a:Chess", "--sampling.regroup", "1"], "environment: sampling.regroup"),
            (TrainConfig, ["--tools", "a:add", "--sampling.regroup", "1"], "tools: sampling.regroup"),
            (TrainConfig, ["--turns.seconds", "0"], "turns.seconds"),
            (TrainConfig, ["--data.chat-template-kwargs", "enable_thinking=false"], "data.chat_template_kwargs"),
            (TrainConfig, ["--data.chat-template-kwargs", '{"tokenize": true}'], "data.chat_template_kwargs"),
            (TrainConfig, [*THINKING, "--data.prompt-style", "plain"], "data.chat_template_kwargs"),
            (TrainConfig, ["--data.chat-template", "a.jinja", "--data.prompt-style", "plain"], "data.chat_template"),
            (TrainConfig, ["--sampler", "vllm-server"], "vllm_url"),
            (EvalConfig, ["--sampler", "vllm-server", "--vllm-url", "127.0.0.1:8000"], "vllm_url"),
            (RolloutConfig, ["--sampler", "vllm", "--device", "cuda:1"], "device"),
            (TrainConfig, ["--vllm.enable-sleep-mode"], "vllm.enable_sleep_mode"),
            (TrainConfig, ["--sampler", "vlm"], "sampler: must be one of hf, vllm, vllm-server, or module:Class"),
            (
                TrainConfig,
                [*QUANTISED, "--sampler", "my:Sampler"],
                "lora.load_in_4bit: sampler my:Sampler would sample with",
            ),
            (
                TrainConfig,
                ["--sampler", "my:Sampler", "--vllm.enable-sleep-mode"],
                "vllm.enable_sleep_mode: sampler my",
            ),
            (RolloutConfig, [*ASLEEP, "--weights", "server"], "vllm.enable_sleep_mode"),
            (TrainConfig, RENORMALISED, "sampling.top_p"),
            (TrainConfig, ["--sampler", "vllm", *TOWER_ADAPTERS], "freeze_vision_tower: vLLM"),
            (TrainConfig, ["--sampler", "vllm", "--sampling.repetition-penalty", "2"], "sampling.repetition_penalty"),
            (
                TrainConfig,
                ["--sampler", "vllm", "--sampling.min-p", "0.1", "--loss.old-logps", "log_linear"],
                "sampling.min_p: vLLM",
            ),
            (SftConfig, [], "data.path"),
            (SftConfig, ["--data.path", "d.jsonl", "--optimizer.master-weights", "saved"], "optimizer.master_weights"),
            (DemoConfig, ["--max-steps", "0"], "max_steps"),
        ],
    )
    def test_name_the_field(
        self, capsys: pytest.CaptureFixture[str], cls: type[BaseSettings], arguments: list[str], field: str
    ) -> None:
        model = [] if cls is DemoConfig or "--model" in arguments else ["--model", "m"]
        with pytest.raises(SystemExit) as stopped:
            load(cls, *model, *arguments)
        assert stopped.value.code == 2
        words = capsys.readouterr().err
        assert words.startswith(f"policy-trainer: {field}") and len(words.splitlines()) == 1, words

    def test_a_file_may_spell_nan_but_not_use_it(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "config.toml"
        file.write_text('model = "m"\nrewards = ["tags"]\nreward_weights = [nan]\n')
        with pytest.raises(SystemExit):
            load(TrainConfig, "--config", str(file))
        assert " reward_weights.0: " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("cls", "arguments"),
        [
            (EvalConfig, ["--dtype", "float16"]),
            (EvalConfig, RENORMALISED),
            (TrainConfig, [*RENORMALISED, "--loss.old-logps", "recomputed"]),
            (TrainConfig, [*RENORMALISED, "--loss.old-logps", "current"]),
        ],
    )
    def test_are_for_those_who_would_suffer(self, cls: type[BaseSettings], arguments: list[str]) -> None:
        load(cls, "--model", "m", *arguments)


def test_generation_kwargs_are_settings_by_other_names() -> None:
    """They replace those given otherwise, as in TRL."""
    theirs = {"max_new_tokens": 7, "top_k": -1, "stop_strings": "x", "do_sample": True, "bad_words_ids": None}
    given = SamplingConfig.model_validate({"max_completion_length": 9, "min_p": 0.5, "generation_kwargs": theirs})
    assert given == SamplingConfig(max_completion_length=7, min_p=0.5, stop=["x"])


def test_a_function_of_the_loss_is_written_by_its_name(tmp_path: Path) -> None:
    def taper(tokens: Any) -> Any: ...

    loss = LossConfig.model_validate({"surrogate": taper, "advantage": "m:median"})
    assert (loss.surrogate, loss.scale) == (taper, "none")
    config = TrainConfig(model="m", run_dir=tmp_path, loss=loss)
    written = config.model_dump(mode="json")["loss"]
    assert (written["surrogate"], written["advantage"]) == ("caller:taper", "m:median")
    assert "loss" not in worker_settings(config), "no worker calls it, or may be asked to import it"


def test_environments_by_name() -> None:
    config = load(TrainConfig, "--model", "m", "--environment", "x=a:Chess", "y=b.c:Go", "--turns.rollout-seconds", "0")
    assert config.named_environments() == {"x": "a:Chess", "y": "b.c:Go"} and config.turns.rollout_seconds is None
    assert load(TrainConfig, "--model", "m", "--environment", "a:Chess").named_environments() == {"": "a:Chess"}


# What TOML, the command line or pydantic could change: None, lists, nested groups, paths, quotes, other alphabets.
COMMON: dict[str, Any] = {
    "model": "some/model",
    "device": "cuda:0",
    "task": "jsonl",
    "rewards": ["accuracy", "tags"],
    "reward_weights": [1.0, 0.1],
    "judging": JudgingConfig(seconds=0.5, model=RewardModelConfig(path="some/judge", batch_size=3)),
    "data": DataConfig(
        path=Path("a b/ü.jsonl"),
        columns=ColumnsConfig(prompt="question", answer="gold"),
        chat_template_kwargs={"enable_thinking": False, "documents": ["a", "b"], "effort": "low"},
        assistant_prefill="<think>\n",
        eval_path=Path("/held"),
        system_prompt='Say "yes".\nOr \\ no.',
    ),
    "sampling": SamplingConfig(num_generations=3, min_p=0.1, stop=["\n\n", "</answer>", "é"]),
}
RUN: dict[str, Any] = {
    **COMMON,
    "run_dir": Path("runs/x"),
    "run": "a-name",
    "server": "https://example.org:1",
    "token_file": Path("tokens"),
    "lora": LoraConfig(alpha=16, target_modules=["q_proj"]),
    "tls_ca": Path("ca.pem"),
}
FULL: list[BaseSettings] = [
    TrainConfig(
        **RUN,
        resume=True,
        max_lag=0,
        num_train_epochs=2.5,
        record=Path("recorded"),
        report_to=["tensorboard"],
        loss=LossConfig(advantage_eps=1e-8, drop_zero_variance=False, epsilon_high=0.3),
        optimizer=OptimizerConfig(learning_rate=3e-7, betas=(0.8, 0.95)),
        evaluation=EvaluationConfig(eval_steps=0, problems=3, batch_size=2),
    ),
    RolloutConfig(**RUN, worker=2, workers=5, devices=["cuda:0", "cuda:1"], loss=RolloutLossConfig(advantage="gdpo")),
    EvalConfig(**COMMON, samples=3, evaluation=EvalEvaluationConfig(problems=9)),
]


def dumped(config: BaseSettings) -> dict[str, Any]:
    return config.model_dump(exclude={"config", "resume"})


def read_back(config: BaseSettings, directory: Path) -> Any:
    written = RunDirectory(directory)
    written.write_config(config)
    return load(type(config), "--config", str(written.config))


class TestToken:
    SECRET = "a-token-that-nobody-may-see"

    @pytest.fixture
    def config(self, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
        monkeypatch.setenv("POLICY_TRAINER_TOKEN", self.SECRET)
        return load(TrainConfig, "--model", "m")

    def test_comes_from_the_environment_and_is_written_nowhere(self, config: TrainConfig, tmp_path: Path) -> None:
        assert config.token and config.token.get_secret_value() == self.SECRET
        RunDirectory(tmp_path).write_config(config)
        assert "token" not in config.model_dump()
        assert self.SECRET not in (tmp_path / "config.toml").read_text() + repr(config) + str(config.model_dump())

    def test_is_refused_on_a_command_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            load(TrainConfig, "--model", "m", "--token", self.SECRET)
        err = capsys.readouterr().err
        assert "POLICY_TRAINER_TOKEN" in err and self.SECRET not in err


class TestRoundTrip:
    @pytest.mark.parametrize("config", FULL, ids=lambda config: type(config).__name__)
    def test_of_unusual_values(self, config: BaseSettings, tmp_path: Path) -> None:
        assert dumped(read_back(config, tmp_path)) == dumped(config)

    @settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.text(st.characters(codec="utf-8"), min_size=1), st.floats(min_value=1e-300, allow_infinity=False))
    def test_of_any_text_and_number(self, tmp_path: Path, text: str, number: float) -> None:
        config = TrainConfig(
            model="m",
            data=DataConfig(system_prompt=text),
            sampling=SamplingConfig(stop=[text]),
            optimizer=OptimizerConfig(learning_rate=number),
        )
        assert dumped(read_back(config, tmp_path)) == dumped(config)

    def test_every_command_takes_its_own_fields_from_a_runs_file(self, tmp_path: Path) -> None:
        train = FULL[0]
        assert isinstance(train, TrainConfig)
        RunDirectory(tmp_path).write_config(train)
        file = str(tmp_path / "config.toml")
        rollout = load(RolloutConfig, "--config", file, "--worker", "1", "--workers", "2")
        assert rollout.sampling == train.sampling and rollout.run == "a-name" and rollout.worker == 1
        several = load(RolloutConfig, "--config", file, "--devices", "cuda:0", "cuda:1")
        assert (several.worker, several.workers) == (0, 2)
        single = load(RolloutConfig, "--config", file, "--devices", "cuda:3", "--worker", "1", "--workers", "2")
        assert (single.device, single.worker) == ("cuda:3", 1), "as one of several is told"
        assert load(EvalConfig, "--config", file).evaluation.model_dump() == train.evaluation.model_dump()

    def test_what_a_run_keeps_is_not_what_an_evaluation_prints(self, tmp_path: Path) -> None:
        directory = RunDirectory(tmp_path)
        directory.write_config(TrainConfig(model="m", samples=SamplesConfig(every=7)))
        assert load(EvalConfig, "--config", str(directory.config)).samples == 0
        assert load(EvalConfig, "--config", str(directory.config), "--samples", "4").samples == 4


def test_the_run_is_named_after_its_directory(tmp_path: Path) -> None:
    assert RunConfig(model="m", run_dir=tmp_path / "of-mine").run == "of-mine"
    assert RunConfig(model="m", run_dir=Path(".")).run == tmp_path.name
    assert RunConfig(model="m", run_dir=tmp_path, run="named").run == "named"
