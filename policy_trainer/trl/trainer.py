"""`GRPOTrainer`, on top of `GRPO`, with the arguments of TRL's class and the methods that scripts use."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy_trainer.config.names import TRL_ENTRIES
from policy_trainer.processes.fork_server import prepare_fork_server
from policy_trainer.python_api.callbacks import callback_input
from policy_trainer.python_api.grpo import GRPO, environment
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trl.cautions import cautions, log, refuse_contradictions
from policy_trainer.trl.config import GRPOConfig, checked_config
from policy_trainer.trl.files import INITIAL_MODEL, as_begun, merge, move_earlier_run, resume_from, show_checkpoint
from policy_trainer.trl.hub import Repository, trl_model_card
from policy_trainer.trl.logs import Logs
from policy_trainer.trl.mapping import model_dtype, precision, settings, spelled_in_trl, tracker_variables
from policy_trainer.trl.masks import high_entropy_mask, off_policy_mask
from policy_trainer.trl.objects import adapters, is_adapted, load_processing, saved_path
from policy_trainer.trl.policy import (
    check_adapted,
    has_learnt,
    load_policy_model,
    load_reference,
    save_adapters,
    set_weights,
    with_adapters,
)
from policy_trainer.trl.rewards import (
    check_rewards,
    environment_reward,
    listed,
    reward_inputs,
    reward_names,
    tool_functions,
)
from policy_trainer.trl.rows import check_environments, held_out_rows, rows_of, training_rows
from policy_trainer.trl.steps import count_steps
from shared.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainerCallback

    from policy_trainer.python_api.callbacks import AnyCallback


class GRPOTrainer:
    """TRL's GRPOTrainer. It starts a run of `policy_trainer.GRPO` with its files in args.output_dir.

    Raises UserError, with TRL's argument name, for arguments that Tandem cannot honour.
    """

    @spelled_in_trl
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: "Iterable[AnyCallback] | None" = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: "list[Callable[..., Any]] | None" = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        for name, values in (("rollout_func", (rollout_func,)), ("optimizers", optimizers)):
            if any(value is not None for value in values):
                raise UserError(f"{name}: {TRL_ENTRIES[name][1]}")
        default = f"{Path(str(getattr(model, 'name_or_path', model))).name}-GRPO"
        self.args = checked_config(args or GRPOConfig(default))
        functions, tokenizers = listed(reward_funcs), listed(reward_processing_classes)
        check_rewards(self.args, functions, tokenizers, environment_factory)
        in_4bit, held_out = quantization_config is not None, eval_dataset is not None
        refuse_contradictions(self.args, adapts=peft_config is not None, in_4bit=in_4bit, held_out=held_out)
        for caution in cautions(self.args):
            log.warning(caution)
        if not self.args.use_vllm:  # before anything here imports PyTorch
            prepare_fork_server("cpu" if self.args.use_cpu else "auto")
        evaluates = self.args.eval_strategy != "no"
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._environments = environment_factory
        rows, shuffle = training_rows(train_dataset, self.args, environment_factory)
        self._rows = rows
        number = None if rows is None else len(rows)
        steps = count_steps(self.args, number)
        in_chat = rows is None or not isinstance(rows[0].get("prompt"), str)  # a text is used as is, as in TRL
        given = settings(self.args, steps, in_chat=in_chat, evaluates=evaluates)
        given["loss"].setdefault("router_aux_loss_coef", "model")
        if rows is not None:
            given["data"]["shuffle"] = shuffle
        if processing_class is not None:
            self.processing_class = processing_class
        given |= self._policy(model, processing_class, peft_config, quantization_config, given)
        self.observer = Logs(callback_input(callbacks or ()), self.args, steps, rows=number)
        self.observer.on_checkpoint = partial(self._show_checkpoint, steps.after)
        self.state = self.observer.state
        self.reward_func_names = reward_names(functions, environment_factory)
        of_environments = len(self.reward_func_names) - len(functions)
        self.reward_funcs = [*functions, *[environment_reward] * of_environments]
        self.reward_processing_classes = [*(tokenizers or [None] * len(functions)), *[None] * of_environments]
        self.tools = tool_functions(tools, environment_factory)
        rewards = reward_inputs(functions, tokenizers, Path(self.args.output_dir).absolute(), self.state)
        self._make = partial(
            GRPO, dataset=rows, rewards=rewards, tools=tools or (), environment_factory=environment_factory, **given
        )
        # Without an eval_dataset, a tenth of the training rows would be held out.
        nothing = None if rows is None else rows.select([0])
        eval_rows, sizes = held_out_rows(eval_dataset) if evaluates else (nothing, {})
        self._grpo = self._make(eval_dataset=eval_rows)
        self._grpo.observer = self.observer
        names = dict(zip(self._grpo.config.rewards, self.reward_func_names, strict=False))
        self.observer.attach(self._grpo.config, names, sizes)
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)  # scripts write to it before they train
        self._trained: str | None = None  # directory of the trained model, or of its adapters
        self._weights: Path | None = None  # directory of its weights, or adapters
        self._repository = Repository(self.args) if self.args.push_to_hub else None

    def _policy(
        self, model: Any, processing: Any, peft: Any, quantization: Any, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the settings of the policy. given: all other settings."""
        if is_adapted(model):
            check_adapted(model, peft, beta=self.args.beta)
            peft = model.peft_config["default"]
        target = Path(self.args.output_dir, INITIAL_MODEL).absolute()
        path = saved_path(model, processing, target, revision=given.get("revision"))
        self._peft_config, self._name = peft, str(getattr(model, "name_or_path", model))
        self._dtype = str(model.dtype).removeprefix("torch.") if hasattr(model, "config") else model_dtype(self.args)
        dtype, masters = precision(self.args, self._dtype, adapters=peft is not None, in_4bit=quantization is not None)
        ours = {"model": path, "dtype": dtype, "optimizer": {**given["optimizer"], "master_weights": masters}}
        if peft is not None:
            ours["lora"] = adapters(peft, quantization, model)
            ours["reference"] = {**given["reference"], "source": "adapter-off"}
            ours["freeze_vision_tower"] = None if self.args.use_vllm else False  # vLLM adapts the language model only
        if hasattr(model, "config"):
            self.model = model if peft is None or is_adapted(model) else with_adapters(model, peft, self._name)
        return ours

    @cached_property
    def model(self) -> Any:
        """The model in TRL's precision; with adapters, a peft.PeftModel. `train()` updates its weights in place."""
        return load_policy_model(self._grpo.config, self._dtype, self._peft_config, self._name, self._weights)

    @cached_property
    def ref_model(self) -> Any:
        """A copy of the reference model, which the run itself does not use. None if beta is 0 or with adapters."""
        return load_reference(self._grpo.config, self._dtype, self._checkpoint())

    @property
    def reward_weights(self) -> "Tensor":
        """float32, one weight for each of `reward_funcs`; an environment's reward has the weight 1."""
        import torch

        given = self.args.reward_weights or []
        return torch.tensor([*given, *[1.0] * (len(self.reward_funcs) - len(given))])

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the loss includes the load-balancing loss of a mixture of experts."""
        from policy_trainer.learner.routing import router_aux_loss_coef

        coef = self._grpo.config.loss.router_aux_loss_coef
        return router_aux_loss_coef(self.model.config.get_text_config(), coef) != 0

    @property
    def entropy_coef(self) -> Any:
        """The coefficient of the entropy bonus after the latest update."""
        return self.observer.entropy_coef

    @property
    def _logs(self) -> dict[str, Any]:
        """The latest completions, as TRL keeps them for its table."""
        return self.observer.completions()

    @cached_property
    def accelerator(self) -> Any:
        """accelerate's Accelerator, for scripts that use its `print` or `is_main_process`. Training does not use it."""
        from accelerate import Accelerator

        return Accelerator(cpu=self.args.use_cpu)

    @cached_property
    def processing_class(self) -> Any:
        return load_processing(self._grpo.config)

    @spelled_in_trl
    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> Any:
        """Trains to the last step. resume_from_checkpoint: True for the newest checkpoint in output_dir, or the path of
        one.

        Returns transformers' TrainOutput. Raises UserError and RunFailed, as `GRPO.train` does, and
        KeyboardInterrupt after a Ctrl-C, which writes a checkpoint first.
        """
        from transformers.trainer_utils import TrainOutput

        wanted = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if self._trained and not wanted:
            raise UserError(
                "train: has already run",
                "continue with resume_from_checkpoint=True, or pass the model to a new trainer",
            )
        check_environments(self._rows, self._environments)
        self.observer.summary = {}  # it stays empty if the run is stopped while its model loads
        with environment(tracker_variables(self.args)):
            self._run(wanted)
        if self._repository:
            self._repository.finish()
        summary = self.observer.summary
        return TrainOutput(self.state.global_step, summary.get("train_loss", 0.0), summary)

    def _run(self, wanted: Any) -> None:
        """Runs the training. wanted: the checkpoint to resume from, or True for the newest."""
        grpo, adapted = self._grpo, self._peft_config is not None
        lora, run_dir = grpo.config.lora, grpo.config.run_dir
        if wanted:
            grpo.config = as_begun(grpo.config)
            resume_from(wanted, grpo.config.model_copy(update={"resume": True}))
        else:
            move_earlier_run(grpo.config)
        if adapted and not wanted and "model" in vars(self):
            lora = lora.model_copy(update={"path": save_adapters(self.model, run_dir)})
        grpo.config = grpo.config.model_copy(update={"resume": bool(wanted), "lora": lora})
        result = grpo.train()
        if result.model is not None:
            best = result.best_model if self.args.load_best_model_at_end else None
            self._keep(best or str(self._checkpoint()), result.model if best is None else None)
        if not result.finished and not self.observer.requested.stop:
            raise KeyboardInterrupt  # after a Ctrl-C the script does not continue, as in TRL

    def _keep(self, weights: str, model: str | None) -> None:
        """Records the result of a run. weights: the checkpoint whose weights `self.model` gets. model: the model that
        evaluations use; by default the one with these weights."""
        self._weights, self._trained = Path(weights), model or weights
        if "model" in vars(self):
            set_weights(self.model, self._weights, self._grpo.config.device)
        vars(self).pop("ref_model", None)  # it may have been synchronised

    def _checkpoint(self) -> Path | None:
        """The run's newest checkpoint."""
        from policy_trainer.run_files.checkpoint import Checkpoints

        return Checkpoints(RunDirectory(self._grpo.config.run_dir).checkpoints, keep=1).newest()

    def _show_checkpoint(self, updates_after: Callable[[int], int], saved: Path) -> None:
        if self.args.save_strategy == "no":
            return
        link = show_checkpoint(saved, self.state, updates_after)
        self.create_model_card()
        if self._repository:
            shutil.copy(Path(self.args.output_dir, "README.md"), saved)
            self._repository.upload_checkpoint(link, f"Training in progress, step {self.state.global_step}")

    @spelled_in_trl
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Evaluates the trained model, or before `train()` the initial one, with the same rewards. Returns the metrics;
        callbacks and `state` get them, too.

        eval_dataset: by default the trainer's. Raises UserError and RunFailed, as `GRPO.evaluate` does.
        """
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if given is None:
            raise UserError(
                "eval_dataset: evaluation requires an eval_dataset", "pass one to evaluate() or the trainer"
            )
        if self._trained is None and "model" in vars(self) and has_learnt(self.model):
            raise UserError("evaluate: before train() it ignores trained adapters", "pass model.merge_and_unload()")
        if isinstance(given, Mapping):
            several = [self.evaluate(each, ignore_keys, f"{metric_key_prefix}_{name}") for name, each in given.items()]
            return {name: value for metrics in several for name, value in metrics.items()}
        from shared.models import is_adapter

        rows = rows_of(given, "eval_dataset")
        if self._trained and is_adapter(Path(self._trained)):
            self._trained = merge(Path(self._trained), self._grpo.config.run_dir)
        with self.observer.stopwatch("evaluate"):
            evaluation = self._make(eval_dataset=rows).evaluate(self._trained)
        figures = self.observer.figures(evaluation, {metric_key_prefix: len(rows)})
        self.observer.evaluated({**evaluation.summary(), **figures}, best=False)
        return {name: value for name, value in self.state.log_history[-1].items() if name != "step"}

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Writes the model, or its adapters, and the tokenizer or processor, by default to args.output_dir. With
        args.push_to_hub also uploads them."""
        directory = str(output_dir or self.args.output_dir)
        self.model.save_pretrained(directory)
        self.processing_class.save_pretrained(directory)
        if self._repository and not _internal_call:
            self.push_to_hub("Model save")

    def save_state(self) -> None:
        """Writes `state` to args.output_dir, as trainer_state.json."""
        self.state.save_to_json(str(Path(self.args.output_dir, "trainer_state.json")))

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Prints metrics as a table. split: train, eval or another name."""
        from transformers.trainer_pt_utils import log_metrics

        log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Writes metrics to SPLIT_results.json in args.output_dir. combined: also adds them to all_results.json."""
        from transformers.trainer_pt_utils import save_metrics

        save_metrics(self, split, metrics, combined)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None
    ) -> None:
        """Writes the model card to args.output_dir, as README.md."""
        self._write_card(self._repository, model_name, dataset_name, tags)

    def _write_card(
        self, repository: Repository | None, model_name: str | None = None, dataset_name: str | None = None,
        tags: Any = None,
    ) -> None:  # fmt: skip
        name = model_name or Path(str(self.args.hub_model_id or Path(self.args.output_dir).absolute())).name
        text = trl_model_card(
            name, self._name, dataset_name, tags, Path(self._grpo.config.run_dir),
            adapters=self._peft_config is not None, repository=repository.name if repository else None,
        )  # fmt: skip
        Path(self.args.output_dir, "README.md").write_text(text)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Uploads the model, or its adapters, with tokenizer and model card. card: arguments of `create_model_card`.

        Returns huggingface_hub's CommitInfo, or with blocking=False a Future of it.
        """
        repository = self._repository
        if repository:
            repository.finish()
        if repository is None or token is not None or private is not None:  # of this call only
            repository = Repository(self.args, token=token, private=private)
        self.save_model(_internal_call=True)
        self._write_card(repository, **card)
        return repository.upload(Path(self.args.output_dir), commit_message, revision=revision, wait=blocking)

    def is_world_process_zero(self) -> bool:
        return True

    def is_local_process_zero(self) -> bool:
        return True

    def add_callback(self, callback: "AnyCallback") -> None:
        self.observer.callbacks += callback_input([callback])

    def pop_callback(self, callback: "AnyCallback") -> "TrainerCallback | None":
        """Removes and returns the first callback that equals this one or is of this class; None if there is none."""
        for each in self.observer.callbacks:
            if isinstance(each, callback) if isinstance(callback, type) else each == callback:
                self.observer.callbacks.remove(each)
                return each
        return None

    def remove_callback(self, callback: "AnyCallback") -> None:
        self.pop_callback(callback)

    get_off_policy_mask = staticmethod(off_policy_mask)

    def get_high_entropy_mask(self, entropies: "Tensor", mask: "Tensor", threshold: float) -> "Tensor":
        return high_entropy_mask(entropies, mask, threshold)
