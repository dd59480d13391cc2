"""DeepSeekMath (arXiv 2402.03300), with outcome and with process supervision."""

from collections.abc import Mapping

from policy_trainer.presets.preset import AT_ONCE, SNAPSHOT_ROOT, Number, Preset

_DEEPSEEK_MATH: Mapping[str, Number] = {
    "task": Number("mixture", "4.2: questions related to GSM8K and MATH"),
    "data.mixture": Number(
        [
            {"task": "gsm8k", "weight": 1.0},
            {"task": "math", "weight": 1.0, "dataset": "DigitalLearningGmbH/MATH-lighteval", "eval_split": "test"},
        ],
        "4.2: questions related to GSM8K and MATH",
        "Half and half; the paper's 144K questions, of its own supervised data, are not public.",
    ),
    "groups_per_step": Number(16, "4.2: batch size 1024, in groups of 64"),
    "num_iterations": Number(1, "4.2: a single update following each exploration stage"),
    "minibatches": Number(1, "4.2: a single update following each exploration stage"),
    "reference.sync_steps": Number(
        100,
        "algorithm 1: the reference is the policy as an outer iteration begins",
        "The paper does not tell how many steps an iteration has: 100 is ours.",
    ),
    "sampling.num_generations": Number(64, "4.2: 64 outputs for each question"),
    "sampling.max_completion_length": Number(
        1024, "4.2: the max length is 1024", "There the prompt may count as well."
    ),
    "loss.drop_zero_variance": Number(False, "equation 3: every group trains, if only on the KL"),
    "loss.old_logps": Number("recomputed", "algorithm 1: the policy as the sampling of a batch begins"),
    "loss.surrogate": Number("clip", "equation 3"),
    "loss.aggregation": Number("sequence_mean", "equation 3"),
    "loss.beta": Number(0.04, "4.2: the KL coefficient is 0.04"),
    "loss.kl": Number("k3", "equation 4"),
    "optimizer.learning_rate": Number(1e-6, "4.2: the learning rate of the policy model is 1e-6"),
}
_DEEPSEEK_MATH_UNPUBLISHED = (
    "sampling.temperature",
    "loss.advantage_std",
    "loss.advantage_eps",
    "loss.epsilon",
    "optimizer.max_grad_norm",
    "max_steps",
)

DEEPSEEK_MATH = Preset(
    name="deepseek-math",
    summary="the first GRPO: outcome supervision, iterative",
    origin="DeepSeekMath, arXiv 2402.03300",
    data="GSM8K + MATH",
    numbers={
        **_DEEPSEEK_MATH,
        "rewards": Number(
            ["accuracy"],
            "4.1.2: one reward at the end of each output",
            "The paper's is a trained model's: --rewards model --judging.model.path DIRECTORY.",
        ),
        "loss.advantage": Number("outcome", "4.1.2"),
    },
    deviations=(AT_ONCE,),
    unpublished=_DEEPSEEK_MATH_UNPUBLISHED,
    wants=SNAPSHOT_ROOT,
)

DEEPSEEK_MATH_PROCESS = Preset(
    name="deepseek-math-process",
    summary="process supervision: a reward for each step",
    origin="DeepSeekMath, arXiv 2402.03300",
    data="GSM8K + MATH",
    numbers={
        **_DEEPSEEK_MATH,
        "rewards": Number(["accuracy"], "recorded beside the rewards of steps, which are what is learnt from"),
        "judging.steps": Number(True, "4.1.3: a reward at the end of each step"),
        "loss.advantage": Number("process", "4.1.3"),
    },
    deviations=(AT_ONCE,),
    unpublished=_DEEPSEEK_MATH_UNPUBLISHED,
    wants={
        **SNAPSHOT_ROOT,
        "task": "one that judges steps, as arithmetic does: the paper's process reward model is not public",
    },
)
