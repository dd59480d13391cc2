"""Recipes that were published as code."""

from policy_trainer.presets.preset import AT_ONCE, SNAPSHOT_ROOT, Number, Preset

_COUNTDOWN = "Jiayi-Pan/Countdown-Tasks-3to4"
_OWN_WORDS = "The same tags in our own words."
_REASONING_THEN_ANSWER = (
    "Respond with your reasoning and then the answer alone, in this form:\n"
    "<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
)
_THINK_THEN_ANSWER_ON_LINES = (
    "You are a helpful assistant. Think about how to solve the problem first, and then give the answer alone. "
    "Respond in this form, each tag on a line of its own:\n<think>\n...\n</think>\n<answer>\n...\n</answer>"
)

SIMPLE_GRPO = Preset(
    name="simple-grpo",
    summary="a reference server, and ratios against the sampler's log-probs",
    origin="github.com/lsdefine/simple_GRPO, grpo_vllm_one.py",
    data="GSM8K",
    numbers={
        "task": Number("gsm8k", 'load_dataset("openai/gsm8k", "main", split="train")'),
        "rewards": Number(["gsm8k/simple_grpo"], "reward_correct + reward_format"),
        "max_steps": Number(250, "all_steps = 1000 micro-batches, accumulated by 4"),
        "groups_per_step": Number(4, "micro-batches of 8 are one group each, gradient_accumulation_steps = 4"),
        "num_iterations": Number(1, "one optimizer step for 4 micro-batches, each trained on once"),
        "minibatches": Number(1, "one optimizer step for 4 micro-batches, each trained on once"),
        "publish_every": Number(4, "gen_update_steps = 16 micro-batches, accumulated by 4"),
        "sampling.num_generations": Number(8, "num_pre_Q = 8"),
        "sampling.prompts_per_round": Number(5, "Q_batch_size = 5"),
        "sampling.temperature": Number(
            0.9,
            "SamplingParams(temperature=0.9)",
            "Scored and trained at 0.9 too, so that ratio and KL are of what was sampled; the original's are at 1.",
        ),
        "sampling.max_completion_length": Number(700, "SamplingParams(max_tokens=700)"),
        "loss.advantage": Number("outcome", "(r - r.mean()) / (r.std() + 1e-4)"),
        "loss.advantage_std": Number("unbiased", "torch's std"),
        "loss.advantage_eps": Number(1e-4, "r.std() + 1e-4"),
        "loss.drop_zero_variance": Number(
            True,
            "groups whose rewards differ by less than 1e-4 are not uploaded",
            "Dropped by the trainer, so that a step has fewer than 4 groups then; the original waits for others.",
        ),
        "loss.old_logps": Number("sampler", "compute_gen_logps = True"),
        "loss.surrogate": Number("clip", "min(ratio A, clamped ratio A)"),
        "loss.epsilon": Number(0.2, "clip_param = 0.2"),
        "loss.aggregation": Number("sequence_mean", "mean over completions of means over tokens"),
        "loss.beta": Number(0.04, "beta = 0.04"),
        "loss.kl": Number("k3", "exp(x) - x - 1"),
        "optimizer.learning_rate": Number(1e-6, "DeepSpeed AdamW, lr 1e-6"),
        "optimizer.weight_decay": Number(0.0, "DeepSpeed's default"),
        "optimizer.max_grad_norm": Number(0.0, "DeepSpeed's default: gradients are not clipped"),
    },
    deviations=("The system prompt is task gsm8k's: the same tags in our own words.",),
)

NANO_AHA_MOMENT = Preset(
    name="nano-aha-moment",
    summary="plain policy gradient with a little KL",
    origin="github.com/McGill-NLP/nano-aha-moment, nano_r1_script.py",
    data="Countdown",
    numbers={
        "task": Number("countdown", "the numbers and the target of each row"),
        "data.dataset": Number(_COUNTDOWN, "DATASET_NAME"),
        "rewards": Number(["countdown/nano_aha"], "format_reward_func + equation_reward_func"),
        "max_steps": Number(1000, "NUM_ITERATIONS = 1000"),
        "groups_per_step": Number(16, "EPISODES_PER_ITERATION = 64, in groups of 4"),
        "num_iterations": Number(1, "one optimizer step an iteration"),
        "minibatches": Number(1, "train_batch_size = EPISODES_PER_ITERATION"),
        "sampling.num_generations": Number(4, "GENERATIONS_PER_SAMPLE = 4"),
        "sampling.prompts_per_round": Number(16, "the prompts of an iteration are sampled together"),
        "sampling.temperature": Number(1.0, "TEMPERATURE = 1.0"),
        "sampling.top_p": Number(0.999, "TOP_P = 0.999: keeps vLLM from token ids that the tokenizer lacks"),
        "sampling.max_completion_length": Number(1024, "MAX_RESPONSE_TOKENS = 1024"),
        "loss.advantage": Number("outcome", "(r - r.mean()) / (r.std() + 1e-4)"),
        "loss.advantage_std": Number("population", "numpy's std"),
        "loss.advantage_eps": Number(1e-4, "r.std() + 1e-4"),
        "loss.drop_zero_variance": Number(False, "every group trains, if only on the KL"),
        "loss.old_logps": Number("current", "no old log-probs: there is no ratio"),
        "loss.surrogate": Number("reinforce", "-logps * advantages"),
        "loss.aggregation": Number("token_mean", "divided by total_response_len of the iteration"),
        "loss.beta": Number(0.001, "KL_COEFFICIENT = 0.001"),
        "loss.kl": Number("k3", "exp(x) - x - 1"),
        "optimizer.learning_rate": Number(1e-6, "LEARNING_RATE = 1e-6"),
        "optimizer.betas": Number((0.9, 0.999), "betas = (0.9, 0.999)"),
        "optimizer.weight_decay": Number(0.0, "weight_decay = 0"),
        "optimizer.max_grad_norm": Number(1.0, "gradient_clipping = 1.0"),
    },
    deviations=(AT_ONCE,),
)

GRPO_ZERO = Preset(
    name="grpo-zero",
    summary="plain policy gradient without KL",
    origin="github.com/policy-gradient/GRPO-Zero, config.yaml and grpo.py",
    data="Countdown",
    numbers={
        "task": Number("countdown", "the numbers and the target of each row"),
        "data.dataset": Number(_COUNTDOWN, "data.path: Countdown-Tasks-3to4"),
        "rewards": Number(["countdown/grpo_zero"], "0.1 * format_reward + answer_reward"),
        "max_steps": Number(
            100,
            "train.py: one pass over the data",
            "A pass is many thousand steps; 100 is the default of any run.",
        ),
        "groups_per_step": Number(32, "num_questions_per_batch: 32"),
        "num_iterations": Number(1, "one optimizer step a batch"),
        "minibatches": Number(1, "one optimizer step a batch"),
        "micro_batch_tokens": Number(
            2560,
            "micro_batch_size: 2 completions, of 256 + 1024 tokens at most",
            "A group is never cut, so that a micro-batch is a group where that has more; the step's loss is the same.",
        ),
        "data.max_prompt_length": Number(256, "max_prompt_len: 256"),
        "sampling.num_generations": Number(8, "batch_size: 256 completions of 32 questions"),
        "sampling.prompts_per_round": Number(32, "the questions of a batch are sampled together"),
        "sampling.temperature": Number(1.0, "sampled from the softmax as it is"),
        "sampling.max_completion_length": Number(1024, "max_gen_len: 1024"),
        "loss.advantage": Number("outcome", "normalize_rewards_per_group"),
        "loss.advantage_std": Number("population", "numpy's std"),
        "loss.advantage_eps": Number(1e-4, "std + 1e-4"),
        "loss.drop_zero_variance": Number(False, "every group counts in the mean over tokens"),
        "loss.old_logps": Number("current", "no old log-probs: there is no ratio"),
        "loss.surrogate": Number("reinforce", "log-probs times advantages"),
        "loss.aggregation": Number("token_mean", "divided by the target tokens of the batch"),
        "loss.beta": Number(0.0, "no KL, no reference model"),
        "optimizer.learning_rate": Number(1e-5, "learning_rate: 1.0e-5"),
        "optimizer.betas": Number((0.9, 0.999), "betas: [0.9, 0.999]"),
        "optimizer.weight_decay": Number(0.0, "weight_decay: 0.0"),
        "optimizer.max_grad_norm": Number(1.0, "max_grad_norm: 1.0"),
    },
    deviations=(
        AT_ONCE,
        'The prompt has the words of nano-aha-moment; the original has "in your mind", "return the final answer", and '
        "another example.",
    ),
)

LM_BOOK = Preset(
    name="lm-book",
    summary="the Language Models Book's GRPO, iterative",
    origin="github.com/aburkov/theLMbook, the GRPO notebook for Qwen2.5-0.5B-Instruct",
    data="GSM8K",
    numbers={
        "task": Number("gsm8k", "prepare_dataset: openai/gsm8k, main"),
        "rewards": Number(["gsm8k/lm_book"], "combined_reward"),
        "data.system_prompt": Number(_REASONING_THEN_ANSWER, "SYSTEM_PROMPT", _OWN_WORDS),
        "data.prompt_style": Number("plain", "build_prompt joins the texts of the messages"),
        "max_steps": Number(500, "num_iterations = 1, steps_per_iteration = 500"),
        "groups_per_step": Number(4, "batch_size = 4"),
        "num_iterations": Number(1, "mu = 1"),
        "minibatches": Number(1, "mu = 1"),
        "reference.sync_steps": Number(500, "copied from the policy as an outer iteration begins: 500 steps"),
        "sampling.num_generations": Number(16, "num_generations = 16"),
        "sampling.prompts_per_round": Number(4, "batch_size = 4"),
        "sampling.temperature": Number(1.0, "generate(temperature=1.0)"),
        "sampling.max_completion_length": Number(500, "max_completion_length = 500"),
        "loss.advantage": Number("outcome", "compute_group_relative_advantages"),
        "loss.advantage_std": Number("unbiased", "torch's std"),
        "loss.advantage_eps": Number(1e-4, "std + 1e-4"),
        "loss.drop_zero_variance": Number(False, "every group trains, if only on the KL"),
        "loss.old_logps": Number("recomputed", "old_log_probs: the policy's own, before the updates of a batch"),
        "loss.surrogate": Number("clip", "min(ratio A, clamped ratio A)"),
        "loss.epsilon": Number(0.1, "epsilon = 0.1"),
        "loss.aggregation": Number("sequence_mean", "mean over completions of means over tokens"),
        "loss.beta": Number(0.04, "beta = 0.04"),
        "loss.kl": Number("k3", "exp(x) - x - 1"),
        "optimizer.learning_rate": Number(5e-6, "learning_rate = 5e-6"),
        "optimizer.weight_decay": Number(0.0, "torch.optim.Adam, which AdamW without weight decay is"),
        "optimizer.max_grad_norm": Number(0.1, "clip_grad_norm_(max_norm=0.1)"),
    },
    deviations=(
        AT_ONCE,
        "The original makes a new optimizer at each outer iteration; here its moments live on.",
    ),
    wants=SNAPSHOT_ROOT,
)

OPEN_R1 = Preset(
    name="open-r1",
    summary="Open-R1's Qwen2.5-1.5B: TRL's loss, three rewards, a cosine",
    origin="github.com/huggingface/open-r1, recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml, and TRL's defaults",
    data="math",
    numbers={
        "task": Number("math", "dataset_name: open-r1/OpenR1-Math-220k"),
        "rewards": Number(["math/open_r1"], "reward_funcs: accuracy, format, tag_count"),
        "max_steps": Number(
            100,
            "num_train_epochs: 1, max_steps: -1",
            "An epoch is many thousand steps; 100 is the default of any run, and the cosine with its warm-up is "
            "over as many.",
        ),
        "groups_per_step": Number(
            4,
            "per_device_train_batch_size: 16, gradient_accumulation_steps: 4, in groups of 16",
            "That is of one device; the original trained on several, each with as many.",
        ),
        "num_iterations": Number(1, "TRL: num_iterations = 1"),
        "data.system_prompt": Number(_THINK_THEN_ANSWER_ON_LINES, "system_prompt", _OWN_WORDS),
        "data.max_prompt_length": Number(512, "max_prompt_length: 512"),
        "sampling.num_generations": Number(16, "num_generations: 16"),
        "sampling.temperature": Number(1.0, "TRL's default"),
        "sampling.max_completion_length": Number(1024, "max_completion_length: 1024"),
        "loss.advantage": Number("outcome", "TRL: scale_rewards"),
        "loss.advantage_std": Number("unbiased", "torch's std"),
        "loss.advantage_eps": Number(1e-4, "TRL: std + 1e-4"),
        "loss.drop_zero_variance": Number(False, "every group trains, if only on the KL"),
        "loss.old_logps": Number("current", "TRL: with one iteration old log-probs are the policy's own, detached"),
        "loss.surrogate": Number("clip", "TRL: min(ratio A, clamped ratio A)"),
        "loss.epsilon": Number(0.2, "TRL: epsilon = 0.2; inert while the ratio is 1"),
        "loss.aggregation": Number("token_mean", "TRL: loss_type bnpo"),
        "loss.beta": Number(0.04, "TRL: beta = 0.04"),
        "loss.kl": Number("k3", "exp(x) - x - 1"),
        "optimizer.learning_rate": Number(2e-5, "learning_rate: 2.0e-05"),
        "optimizer.lr_scheduler_type": Number("cosine", "lr_scheduler_type: cosine"),
        "optimizer.warmup_ratio": Number(0.1, "warmup_ratio: 0.1"),
        "optimizer.min_lr_rate": Number(0.0, "transformers' cosine ends at 0"),
        "optimizer.weight_decay": Number(0.0, "transformers' default"),
        "optimizer.max_grad_norm": Number(1.0, "transformers' default"),
    },
    deviations=(AT_ONCE,),
)
