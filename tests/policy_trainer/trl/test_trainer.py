"""What GRPOTrainer makes of TRL's arguments, before any process starts; and what it refuses."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoProcessor, EarlyStoppingCallback, PreTrainedTokenizerFast, Qwen2Config, TrainerCallback

from policy_trainer import RunFailed
from policy_trainer.config import TrainConfig
from policy_trainer.python_api.grpo import GRPOResult
from policy_trainer.trl import GRPOConfig, GRPOTrainer
from shared.errors import UserError
from shared.models import load_model, load_tokenizer, save_model
from tests.policy_trainer.vision_models import save_vision_model

ROWS = Dataset.from_list([{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(20)])
TALKS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(20)])


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def trainer(tmp_path: Path, **given: Any) -> GRPOTrainer:
    """Of a model without weights, unless one is given."""
    Qwen2Config(num_hidden_layers=1).save_pretrained(tmp_path / "outline")
    args = GRPOConfig(str(tmp_path / "out"), **given.pop("config", {}))
    return GRPOTrainer(
        **{"model": str(tmp_path / "outline"), "reward_funcs": reward, "args": args, "train_dataset": ROWS, **given}
    )


def config_of(made: GRPOTrainer) -> TrainConfig:
    return made._grpo.config


def test_prompts_that_are_texts_stand_as_they_are(tmp_path: Path) -> None:
    assert config_of(trainer(tmp_path)).data.prompt_style == "plain"
    assert config_of(trainer(tmp_path, train_dataset=TALKS)).data.prompt_style == "chat"


@pytest.mark.parametrize("form", ["arrow", "pandas", "torch"])
def test_prompts_of_a_format_are_texts(form: str, tmp_path: Path) -> None:
    config = config_of(trainer(tmp_path, train_dataset=ROWS.with_format(form)))
    assert config.data == config_of(trainer(tmp_path)).data


def test_rows_are_those_of_a_transform(tmp_path: Path) -> None:
    def in_messages(batch: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": [[{"role": "user", "content": text}] for text in batch["prompt"]]}

    made = trainer(tmp_path, train_dataset=ROWS.with_transform(in_messages))
    assert config_of(made).data == config_of(trainer(tmp_path, train_dataset=TALKS)).data


def test_a_frame_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train_dataset: .* a DataFrame; pass datasets.Dataset.from_pandas\(frame\)"):
        trainer(tmp_path, train_dataset=ROWS.to_pandas())


def test_all_rows_train_if_nothing_is_evaluated(tmp_path: Path) -> None:
    config = config_of(trainer(tmp_path))
    assert config.evaluation.problems == 0 and config.max_steps == 60
    assert config.data.path and config.data.eval_path and config.data.path != config.data.eval_path
    with pytest.raises(UserError, match="eval_dataset: required by eval_strategy"):
        trainer(tmp_path, config={"eval_strategy": "steps"})


@pytest.mark.parametrize("by_name", [True, False])
def test_a_function_gets_the_state_of_the_trainer(by_name: bool, tmp_path: Path) -> None:
    seen: list[Any] = []

    def named(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        seen.append(trainer_state.global_step)
        return [0.0] * len(completions)

    def stateful(completions: list[str], **columns: Any) -> list[float]:
        assert {"trainer_state", "log_extra", "log_metric"} <= columns.keys()
        return named(completions, columns["trainer_state"])

    if by_name:
        stateful = named
        stateful.__name__ = "stateful"
    made = trainer(tmp_path, reward_funcs=[reward, stateful])
    made.state.global_step = 7
    (function,) = (each for name, each in made._grpo._functions.functions.items() if name == "stateful")
    sample: Any = SimpleNamespace(
        problem=SimpleNamespace(extras={}, answer="", prompt="x", messages=()), finished=True, completion="y", ids=(),
        messages=(), environment=None,
    )  # fmt: skip
    assert function.answers([sample]) == [{"score": 0.0}] and seen == [7]


def test_rewards_of_trl_need_no_state(tmp_path: Path) -> None:
    rewards = pytest.importorskip("trl.rewards")
    assert config_of(trainer(tmp_path, reward_funcs=rewards.accuracy_reward)).rewards == [
        "trl.rewards.accuracy_rewards:accuracy_reward"
    ]


@pytest.mark.parametrize(
    ("given", "lora"),
    [
        (LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"]), (4, 8, ["q_proj", "v_proj"])),
        (LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_rslora=True), (4, 16, ["all-linear"])),
    ],
)
def test_adapters(given: LoraConfig, lora: tuple[Any, ...], tmp_path: Path) -> None:
    config = config_of(trainer(tmp_path, peft_config=given, config={"beta": 0.1}))
    assert (config.lora.rank, config.lora.alpha, config.lora.target_modules) == lora
    assert config.reference.source == "adapter-off"


def test_a_model_of_custom_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    with pytest.raises(ValueError, match=r"^model: .* has custom code for its model type, mine"):
        trainer(tmp_path, model=str(tmp_path / "m"))


def test_dropout_of_adapters_is_left_out_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"peft_config.lora_dropout: trained with 0: adapters have no dropout"):
        made = trainer(tmp_path, peft_config=LoraConfig(target_modules="all-linear", lora_dropout=0.05))
    assert config_of(made).lora.rank == 8


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_adapters_without_modules_get_those_of_peft(make_tiny: Any, tokenizer: Any, tmp_path: Path) -> None:
    save_model(make_tiny(), tokenizer, tmp_path / "m")
    for model in (str(tmp_path / "m"), make_tiny()):
        config = config_of(trainer(tmp_path, model=model, processing_class=tokenizer, peft_config=LoraConfig()))
        assert config.lora.target_modules == ["q_proj", "v_proj"] and config.lora.rank == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft_config": LoraConfig(modules_to_save=["lm_head"])}, "peft_config.modules_to_save: with adapters no"),
        ({"peft_config": LoraConfig(bias="all")}, "peft_config.bias: adapters are plain LoRA"),
        ({"peft_config": LoraConfig(target_modules=".*proj")}, "peft_config.target_modules: must be a list"),
        ({"peft_config": 3}, "peft_config: must be a peft.LoraConfig, got int"),
        ({"rollout_func": reward}, "rollout_func: write a sampler"),
        ({"config": {"generation_kwargs": {"num_beams": 2}}}, "sampling.generation_kwargs: num_beams changes"),
        ({"optimizers": (object(), None)}, "optimizers: AdamW is the only optimizer"),
        ({"quantization_config": object()}, "quantization_config: 4-bit weights cannot be trained"),
        (
            {"eval_dataset": {"a": ROWS, "b": Dataset.from_list([])}, "config": {"eval_strategy": "steps"}},
            "eval_dataset['b']: must be one non-empty",
        ),
        (
            {
                "eval_dataset": {"a": ROWS, "b": Dataset.from_list([{"prompt": 1}])},
                "config": {"eval_strategy": "steps"},
            },
            "eval_dataset: with eval_strategy its datasets are evaluated together",
        ),
    ],
)
def test_arguments_without_a_meaning_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        trainer(tmp_path, **given)
    assert str(refused.value).startswith(message)


def test_reward_models(tmp_path: Path) -> None:
    weights = {"reward_weights": [1.0, 2.0, 3.0]}
    config = config_of(trainer(tmp_path, reward_funcs=[reward, "a/b", "c/d"], config=weights))
    assert config.rewards == ["caller:reward", "model/a/b", "model/c/d"]


def test_an_environment_may_have_the_problems(tmp_path: Path) -> None:
    class Counter:
        def reset(self, **row: Any) -> str:
            return "count"

        def get_reward(self) -> float:
            return 1.0

    config = config_of(
        trainer(
            tmp_path, train_dataset=None, environment_factory=Counter, reward_funcs=None, config={"max_steps": 3},
            tools=[reward],
        )
    )  # fmt: skip
    assert config.task == "environment" and config.environment == ["caller:Counter"] and len(config.tools) == 1


def test_an_environments_tools_and_its_reward_are_among_the_others(tmp_path: Path) -> None:
    class Scored:
        def reset(self, **row: Any) -> str:
            return "play"

        def act(self, x: int) -> int:
            """Acts.

            Args:
                x: a value
            """
            return x

        def get_reward(self) -> float:
            return 0.25

    given: dict[str, Any] = {"reward_funcs": reward, "tools": [reward], "train_dataset": None}
    made = trainer(tmp_path, environment_factory=Scored, config={"max_steps": 1, "reward_weights": [0.5]}, **given)
    assert [tool.__name__ for tool in made.tools] == ["reward", "act"]
    assert made.reward_weights.tolist() == [0.5, 1.0] and made.reward_weights.dtype == torch.float32
    assert made.reward_funcs[-1](environments=[Scored(), object()]) == [0.25, None]
    assert trainer(tmp_path / "plain").reward_weights.tolist() == [1.0]
    made = trainer(tmp_path / "f", environment_factory=lambda: Scored(), config={"max_steps": 1}, **given)
    assert made.reward_func_names == ["reward", "<lambda>"]


def test_a_model_as_an_object_is_written_for_the_other_processes(
    make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_tiny()
    made = trainer(tmp_path, model=model, processing_class=tokenizer)
    target = Path(config_of(made).model)
    assert target.parent == tmp_path / "out" and target.name.startswith("initial-model-")
    assert (target / "tokenizer.json").exists()
    assert config_of(trainer(tmp_path, model=model, processing_class=tokenizer)).model == str(target)
    other = config_of(trainer(tmp_path, model=make_tiny(layers=1), processing_class=tokenizer)).model
    layers = [json.loads((Path(path) / "config.json").read_text())["num_hidden_layers"] for path in (target, other)]
    assert layers == [model.config.num_hidden_layers, 1] != [1, 1], "the first one stays for its run"
    again = trainer(tmp_path, model=str(target), processing_class=tokenizer)
    assert config_of(again).model == str(target), "the same tokenizer needs no copy"


def test_the_processor_of_a_directory_needs_no_copy(tmp_path: Path) -> None:
    directory = save_vision_model("gemma3", tmp_path / "vlm")
    processor = AutoProcessor.from_pretrained(str(directory))
    made = trainer(tmp_path, model=str(directory), processing_class=processor)
    assert config_of(made).model == str(directory) and made.processing_class is processor


@pytest.mark.parametrize("as_object", [False, True])
def test_the_settings_of_a_processor_are_kept(as_object: bool, tmp_path: Path) -> None:
    directory = save_vision_model("gemma3", tmp_path / "vlm")
    processor: Any = AutoProcessor.from_pretrained(str(directory))
    processor.image_processor.image_mean = means = [0.25, 0.5, 0.75]
    processor.tokenizer.chat_template = processor.chat_template = "{{ messages }}"
    loaded = load_model(str(directory), revision=None, device="cpu", dtype="auto")
    made = trainer(tmp_path, model=loaded if as_object else str(directory), processing_class=processor)
    placed = config_of(made).model
    assert placed.startswith(str(tmp_path / "out/initial-model-"))
    saved: Any = AutoProcessor.from_pretrained(placed)
    assert list(saved.image_processor.image_mean) == means
    assert saved.chat_template == load_tokenizer(placed).chat_template == "{{ messages }}"
    again = load_model(placed, revision=None, device="cpu", dtype="auto")
    save_model(again, load_tokenizer(placed), tmp_path / "trained")  # as a run does at its end
    assert list(AutoProcessor.from_pretrained(str(tmp_path / "trained")).image_processor.image_mean) == means


def test_models_of_a_run_have_absolute_paths(
    make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, judge = make_tiny(), make_tiny()
    given = {"model": model, "processing_class": tokenizer, "reward_funcs": [judge], "train_dataset": ROWS}
    monkeypatch.chdir(tmp_path)
    here = GRPOTrainer(**given, reward_processing_classes=[tokenizer], args=GRPOConfig("out"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    there = GRPOTrainer(**given, reward_processing_classes=[tokenizer], args=GRPOConfig("../out"))
    assert Path(config_of(here).model).is_absolute()
    names = [[config.model, *config.rewards] for config in map(config_of, (here, there))]
    assert [Path(name.removeprefix("model/")).resolve() for name in names[1]] == [
        Path(name.removeprefix("model/")) for name in names[0]
    ]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_adapters_are_merged_when_they_are_evaluated(
    make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Those of a run that was stopped, too: a checkpoint is all that it has."""
    save_model(make_tiny(vocabulary=len(tokenizer)), tokenizer, tmp_path / "m")
    args = {"max_completion_length": 4, "use_cpu": True, "num_generations_eval": 2}
    made = trainer(tmp_path, model=str(tmp_path / "m"), peft_config=LoraConfig(), config=args)
    stopped = tmp_path / "out/checkpoints/step-00000001"
    made.model.save_pretrained(str(stopped))
    (stopped / "base").mkdir()
    (stopped / "base/config.json").write_text('{"dtype": "bfloat16"}')
    made._keep(str(stopped), str(stopped))
    assert not [*(tmp_path / "out").glob("merged-model-*")]
    for _ in range(2):
        assert 1 <= made.evaluate(ROWS.select(range(3)))["eval_completions/mean_length"] <= 4
    (merged,) = (tmp_path / "out").glob("merged-model-*")
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16", "the run's"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_adapters_of_a_peft_model_are_trained_further(
    make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    adapted: Any = get_peft_model(make_tiny(vocabulary=len(tokenizer)), LoraConfig(r=4, target_modules=["q_proj"]))
    made = trainer(tmp_path, model=adapted, processing_class=tokenizer, config={"beta": 0.1})
    config = config_of(made)
    assert made.model is adapted and (config.lora.rank, config.lora.target_modules) == (4, ["q_proj"])
    assert config.reference.source == "adapter-off" and made.ref_model is None
    base = load_model(config.model, revision=None, device="cpu", dtype="float32")
    assert {name: weight.tolist() for name, weight in base.named_parameters()} == {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): weight.tolist()
        for name, weight in adapted.named_parameters()
        if "lora_" not in name
    }, "what the other processes load has no adapters"
    with pytest.raises(ValueError, match="You passed a `PeftModel` instance together with a `peft_config`"):
        trainer(tmp_path, model=adapted, processing_class=tokenizer, peft_config=LoraConfig())
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data += 1
    with pytest.raises(UserError, match=r"^evaluate: before train\(\)"):
        made.evaluate(ROWS)
    with pytest.raises(UserError, match=r"^beta: .*pass model.merge_and_unload\(\)"):
        trainer(tmp_path, model=adapted, processing_class=tokenizer, config={"beta": 0.1})


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", ("bfloat16", "saved")), ("bfloat16", ("bfloat16", "none"))]
)
def test_a_model_as_an_object_has_its_own_precision(
    dtype: str, precision: tuple[str, str], make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = config_of(trainer(tmp_path, model=make_tiny(dtype=getattr(torch, dtype)), processing_class=tokenizer))
    assert (config.dtype, config.optimizer.master_weights) == precision


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_the_model_is_there_before_training_as_in_trl(
    make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_model(make_tiny(vocabulary=len(tokenizer), dtype=torch.bfloat16), tokenizer, tmp_path / "m")
    made = trainer(tmp_path, model=str(tmp_path / "m"))
    assert {weight.dtype for weight in made.model.parameters()} == {torch.float32}
    adapted = trainer(tmp_path, model=str(tmp_path / "m"), peft_config=LoraConfig(target_modules=["q_proj"]))
    assert adapted.model.peft_config["default"].base_model_name_or_path == str(tmp_path / "m")
    assert adapted.model.base_model.model.model.embed_tokens is adapted.model.model.model.embed_tokens
    assert made.processing_class.pad_token is not None
    adapted.save_model(str(tmp_path / "saved"))
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "saved").iterdir()
    }


def test_rewards_have_trls_names(tmp_path: Path) -> None:
    class RewardScorer:
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [0.0] * len(completions)

    class Counter:
        def reset(self, **row: Any) -> str:
            return "count"

        def get_reward(self) -> float:
            return 1.0

    given = [reward, "org/judge", RewardScorer(), partial(reward, scale=2)]
    made = trainer(
        tmp_path, reward_funcs=given, environment_factory={"a": Counter, "b": Counter}, config={"max_steps": 1}
    )
    assert made.reward_func_names == ["reward", "judge", "RewardScorer", "reward", "Counter"]
    assert made.reward_funcs[:-1] == given and made.reward_processing_classes == [None] * 5


def test_weights_in_4_bits(tmp_path: Path) -> None:
    given = SimpleNamespace(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    assert config_of(trainer(tmp_path, peft_config=LoraConfig(), quantization_config=given)).lora.load_in_4bit
    given.bnb_4bit_quant_type = "fp4"
    with pytest.raises(UserError, match="quantization_config: must have load_in_4bit, bnb_4bit_quant_type = nf4"):
        trainer(tmp_path, peft_config=LoraConfig(), quantization_config=given)


@pytest.mark.parametrize(("given", "coefficient"), [({}, "model"), ({"router_aux_loss_coef": 0.5}, 0.5)])
def test_a_mixture_of_experts_trains_with_its_coefficient(
    given: dict[str, Any], coefficient: float | str, tmp_path: Path
) -> None:
    assert config_of(trainer(tmp_path, config=given)).loss.router_aux_loss_coef == coefficient


def test_a_model_is_measured_before_it_trains(
    make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def longest(completion_ids: list[list[int]], trainer_state: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_metric("half", 0.5)
        return [float(len(ids)) for ids in completion_ids]

    model = make_tiny(vocabulary=len(tokenizer))
    args = {"max_completion_length": 4, "use_cpu": True, "num_generations_eval": 2}
    made = trainer(tmp_path, model=model, processing_class=tokenizer, reward_funcs=longest, config=args)
    assert made.model is model and made.processing_class is tokenizer
    with pytest.raises(UserError, match=r"^eval_dataset: .* pass one to evaluate\(\)"):
        made.evaluate()
    metrics = made.evaluate(ROWS.select(range(3)))
    assert 1 <= metrics["eval_reward"] <= 4 and len(metrics) > 10
    assert metrics["eval_rewards/longest/mean"] == metrics["eval_reward"] == metrics["eval_completions/mean_length"]
    assert metrics["eval_half"] == 0.5 and math.isfinite(metrics["eval_loss"]) and metrics["eval_runtime"] > 0
    assert made.state.log_history == [{**metrics, "step": 0}] and not config_of(made).evaluation.problems
    named = made.evaluate({"few": ROWS.select([0]), "more": ROWS.select(range(2)).to_iterable_dataset()})
    assert {"eval_few_reward", "eval_more_reward"} <= named.keys()
    assert "eval_few_reward" in made.state.log_history[1] and "eval_more_reward" in made.state.log_history[2]
    tested = made.evaluate(ROWS, metric_key_prefix="test")
    assert {name.partition("_")[0] for name in tested} == {"test", "eval", "epoch"}
    assert tested["test_reward"] == tested["eval_reward"] and "eval_runtime" not in tested, "as TRL names its metrics"

    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise KeyError("no such thing")

    with pytest.raises(RunFailed, match="caller:broken failed on every answer of the evaluation"):
        trainer(tmp_path, model=model, processing_class=tokenizer, reward_funcs=broken, config=args).evaluate(ROWS)


def test_callbacks_come_and_go(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[EarlyStoppingCallback()])
    made.add_callback(EarlyStoppingCallback)
    assert len(made.observer.callbacks) == 2
    first, second = made.observer.callbacks
    assert made.pop_callback(EarlyStoppingCallback) is first and made.pop_callback(first) is None
    made.remove_callback(TrainerCallback)
    assert second not in made.observer.callbacks and made.pop_callback(EarlyStoppingCallback) is None
    assert made.observer.callbacks == [] and made.observer.state is made.state
    with pytest.raises(UserError):
        made.evaluate()
    with pytest.raises(ValueError, match=r"resume_from_checkpoint: No valid checkpoint found in output directory"):
        made.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="resume_from_checkpoint: Can't find a valid checkpoint at checkpoint-3"):
        made.train(resume_from_checkpoint="checkpoint-3")


def test_ctrl_c_ends_the_script_and_a_callback_only_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tmp_path)
    stopped = GRPOResult(finished=False, steps=0, run_dir=tmp_path)
    monkeypatch.setattr(made._grpo, "train", lambda: stopped)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    made.observer.requested.stop = True
    assert made.train().global_step == 0


def test_metrics_are_shown_and_written_as_by_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(tmp_path)
    made.log_metrics("train", {"train_loss": 0.25})
    assert "***** train metrics *****\n  train_loss = 0.25\n" in capsys.readouterr().out
    made.save_metrics("train", {"train_loss": 0.25})
    made.save_metrics("eval", {"eval_loss": 0.5})
    names = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*_results.json")}
    assert names == {
        "train_results.json": {"train_loss": 0.25}, "eval_results.json": {"eval_loss": 0.5},
        "all_results.json": {"train_loss": 0.25, "eval_loss": 0.5},
    }  # fmt: skip
    assert made.is_local_process_zero() and made.is_world_process_zero()


def test_a_run_that_is_stopped_while_it_loads_has_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path)
    made.observer.summary = {"train_loss": 0.5}  # of an earlier run
    monkeypatch.setattr(made, "_run", lambda wanted: None)
    assert made.train(resume_from_checkpoint=True) == (0, 0.0, {})
