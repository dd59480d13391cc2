"""What GRPOTrainer makes of TRL's arguments, before any process starts; and what it refuses."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoProcessor, EarlyStoppingCallback, PreTrainedTokenizerFast, Qwen2Config

from policy_trainer import RunFailed
from policy_trainer.config import TrainConfig
from policy_trainer.trl import GRPOConfig, GRPOTrainer
from policy_trainer.trl.mapping import in_trls_words
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


def test_a_function_gets_the_state_of_the_trainer(tmp_path: Path) -> None:
    seen: list[Any] = []

    def stateful(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        seen.append(trainer_state.global_step)
        return [0.0] * len(completions)

    made = trainer(tmp_path, reward_funcs=[reward, stateful])
    made.state.global_step = 7
    (function,) = (each for name, each in made._grpo._functions.functions.items() if name == "stateful")
    sample: Any = SimpleNamespace(
        problem=SimpleNamespace(extras={}, answer="", prompt="x", messages=()), finished=True, completion="y", ids=(),
        messages=(), environment=None,
    )  # fmt: skip
    assert function.answers([sample]) == [{"score": 0.0}] and seen == [7]


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


def test_adapters_without_modules_get_those_of_peft(make_tiny: Any, tokenizer: Any, tmp_path: Path) -> None:
    save_model(make_tiny(), tokenizer, tmp_path / "m")
    for model in (str(tmp_path / "m"), make_tiny()):
        config = config_of(trainer(tmp_path, model=model, processing_class=tokenizer, peft_config=LoraConfig()))
        assert config.lora.target_modules == ["q_proj", "v_proj"] and config.lora.rank == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft_config": LoraConfig(lora_dropout=0.1)}, "peft_config.lora_dropout: adapters have no dropout"),
        ({"peft_config": LoraConfig(modules_to_save=["lm_head"])}, "peft_config.modules_to_save: with adapters no"),
        ({"peft_config": LoraConfig(bias="all")}, "peft_config.bias: adapters are plain LoRA"),
        ({"peft_config": LoraConfig(target_modules=".*proj")}, "peft_config.target_modules: must be a list"),
        ({"peft_config": 3}, "peft_config: must be a peft.LoraConfig, got int"),
        ({"rollout_func": reward}, "rollout_func: write a sampler"),
        ({"config": {"generation_kwargs": {"num_beams": 2}}}, "sampling.generation_kwargs: num_beams changes"),
        ({"optimizers": (object(), None)}, "optimizers: AdamW is the only optimizer"),
        ({"quantization_config": object()}, "quantization_config: 4-bit weights cannot be trained"),
        (
            {"eval_dataset": {"a": ROWS}, "config": {"eval_strategy": "steps"}},
            "eval_dataset: with eval_strategy it must be one",
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
    assert config.rewards == [f"{__name__}:reward", "model/a/b", "model/c/d"]


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


def test_a_model_as_an_object_is_kept_once_it_trains(
    make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    made = trainer(tmp_path, model=make_tiny(), processing_class=tokenizer)
    target = tmp_path / "out/initial-model"
    assert config_of(made).model == str(target) and (target / "tokenizer.json").exists()
    trainer(tmp_path, model=make_tiny(layers=1), processing_class=tokenizer)  # the first script ended before a step
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 1
    (tmp_path / "out/checkpoints").mkdir()
    trainer(tmp_path, model=make_tiny(), processing_class=tokenizer)
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 1, "the run that is resumed has it"
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
    assert placed == str(tmp_path / "out/initial-model")
    saved: Any = AutoProcessor.from_pretrained(placed)
    assert list(saved.image_processor.image_mean) == means
    assert saved.chat_template == load_tokenizer(placed).chat_template == "{{ messages }}"
    again = load_model(placed, revision=None, device="cpu", dtype="auto")
    save_model(again, load_tokenizer(placed), tmp_path / "trained")  # as a run does at its end
    assert list(AutoProcessor.from_pretrained(str(tmp_path / "trained")).image_processor.image_mean) == means


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_a_model_with_adapters_is_refused_with_what_keeps_them(
    make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    adapted = get_peft_model(make_tiny(vocabulary=len(tokenizer)), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UserError, match=r"already has adapters.*pass model.merge_and_unload\(\)"):
        trainer(tmp_path, model=adapted, processing_class=tokenizer)
    merged = adapted.merge_and_unload()  # type: ignore[operator]
    assert config_of(trainer(tmp_path, model=merged, processing_class=tokenizer)).model.endswith("initial-model")


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
    def longest(completion_ids: list[list[int]], trainer_state: Any, **columns: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    model = make_tiny(vocabulary=len(tokenizer))
    args = {"max_completion_length": 4, "use_cpu": True, "num_generations_eval": 2}
    made = trainer(tmp_path, model=model, processing_class=tokenizer, reward_funcs=longest, config=args)
    assert made.model is model and made.processing_class is tokenizer
    with pytest.raises(UserError, match=r"^eval_dataset: .* pass one to evaluate\(\)"):
        made.evaluate()
    metrics = made.evaluate(ROWS.select(range(3)))
    assert 1 <= metrics["eval_reward"] <= 4 and metrics["eval_problems"] == 3
    assert metrics["eval_rewards/longest/mean"] == metrics["eval_reward"] == metrics["eval_completions/mean_length"]
    assert made.state.log_history == [metrics] and not config_of(made).evaluation.problems
    named = made.evaluate({"few": ROWS.select([0]), "more": ROWS.select(range(2)).to_iterable_dataset()})
    assert (named["eval_few_problems"], named["eval_more_problems"]) == (1, 2)
    assert {name.partition("_")[0] for name in made.evaluate(ROWS, metric_key_prefix="test")} == {"test", "step"}

    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise KeyError("no such thing")

    with pytest.raises(RunFailed, match="caller:broken failed on every answer of the evaluation"):
        trainer(tmp_path, model=model, processing_class=tokenizer, reward_funcs=broken, config=args).evaluate(ROWS)


def test_callbacks_come_and_go(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[EarlyStoppingCallback()])
    made.add_callback(EarlyStoppingCallback)
    assert len(made.observer.callbacks) == 2
    made.remove_callback(EarlyStoppingCallback)
    assert made.observer.callbacks == [] and made.observer.state is made.state
    with pytest.raises(UserError, match="save_model: there is no trained model yet"):
        made.save_model()
    for method in (made.evaluate, made.push_to_hub):
        with pytest.raises(UserError):
            method()
    with pytest.raises(UserError, match="resume_from_checkpoint: must be True"):
        made.train(resume_from_checkpoint="checkpoint-3")  # type: ignore[arg-type]


def test_metrics_have_trls_names() -> None:
    ours = {
        "reward/caller:f": 1.0,
        "reward_std/m:g": 2.0,
        "logged/x/y": 3.0,
        "completion_length_mean": 4.0,
        "reward": 5.0,
    }
    assert in_trls_words(ours) == {
        "rewards/f/mean": 1.0, "rewards/g/std": 2.0, "x/y": 3.0, "completions/mean_length": 4.0, "reward": 5.0,
    }  # fmt: skip
