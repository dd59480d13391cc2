"""Recipes that were published as papers, and the guide's table."""

from policy_trainer.presets.preset import AT_ONCE, Number, Preset

GUIDE = Preset(
    name="guide",
    summary="ratios of whole completions, four updates a batch",
    origin="the GRPO guide's table of hyperparameters",
    data="yours",
    numbers={
        "groups_per_step": Number(16, "batch size 16, read as prompts"),
        "passes": Number(4, "4 updates a batch"),
        "sampling.group_size": Number(8, "group size 8"),
        "sampling.temperature": Number(1.0, "temperature 1"),
        "loss.advantage": Number("outcome", "(r - mean) / (std + eps)"),
        "loss.advantage_eps": Number(1e-8, "eps 1e-8"),
        "loss.drop_zero_variance": Number(False, "the guide drops no group"),
        "loss.old_logps": Number("recomputed", "the policy's own before the updates of a batch"),
        "loss.surrogate": Number("clip", "clipped surrogate"),
        "loss.ratio": Number("sequence_sum", "ratios of summed log-probs"),
        "loss.clip": Number(0.2, "clip 0.2"),
        "loss.mean": Number("sequence_mean", "mean over completions"),
        "loss.beta": Number(0.1, "KL coefficient 0.1"),
        "loss.kl": Number(
            "k1",
            "difference of summed log-probs",
            "Here the mean over a completion's tokens; the guide's sum is as many times as much.",
        ),
        "optimizer.lr": Number(5e-6, "learning rate 5e-6"),
    },
    deviations=(AT_ONCE,),
)

DAPO = Preset(
    name="dapo",
    summary="clip higher, dynamic sampling, token mean, overlong penalty",
    origin="DAPO, arXiv 2503.14476, and verl's recipe/dapo/run_dapo_qwen2.5_32b.sh",
    data="yours",
    numbers={
        "rewards": Number(["accuracy", "soft_overlong"], "2.4 and equation 13"),
        "reward_weights": Number(
            [2.0, 1.0], "2.4: 1 or -1 for the answer, here 1 or 0: twice that differs by a constant, which cancels"
        ),
        "judging.penalty.overlong_tokens": Number(4096, "4.1: 4,096 tokens as the soft punish cache"),
        "groups_per_step": Number(512, "4.1: the prompt batch size is 512"),
        "minibatches": Number(16, "4.1: 16 gradient updates for each rollout step"),
        "sampling.group_size": Number(16, "4.1: 16 responses for each prompt"),
        "sampling.temperature": Number(1.0, "verl: temperature=1.0"),
        "sampling.max_new_tokens": Number(20480, "4.1: 20,480 tokens"),
        "sampling.max_resamples": Number(
            9,
            "3.2: sampled until a batch is full; verl: max_num_gen_batches=10",
            "A group that still has no variance is dropped after 9 others; verl stops the run.",
        ),
        "loss.advantage": Number("outcome", "4.1: group reward normalization"),
        "loss.drop_zero_variance": Number(
            True,
            "equation 11: 0 < right answers < G",
            "What counts is the whole reward, so that a group of right answers with penalties that differ trains.",
        ),
        "loss.old_logps": Number("recomputed", "verl computes them once for each rollout step"),
        "loss.surrogate": Number("clip", "equation 8"),
        "loss.clip": Number(0.2, "4.1: eps_low = 0.2"),
        "loss.clip_high": Number(0.28, "4.1: eps_high = 0.28"),
        "loss.mean": Number("token_mean", "3.3"),
        "loss.beta": Number(0.0, "2.3: no KL"),
        "optimizer.lr": Number(1e-6, "4.1: constant 1e-6"),
        "optimizer.warmup_steps": Number(20, "4.1: linear warm-up over 20 rollout steps"),
        "optimizer.weight_decay": Number(0.1, "verl: weight_decay=0.1"),
        "optimizer.clip_norm": Number(1.0, "verl: grad_clip=1.0"),
    },
    deviations=(AT_ONCE, "Published with DAPO-Math-17K: --task dataset or math, with --data.dataset."),
    unpublished=("loss.advantage_eps", "steps"),
)

DR_GRPO = Preset(
    name="dr-grpo",
    summary="unscaled advantages, sums over a fixed length",
    origin="Understanding R1-Zero-Like Training, arXiv 2503.20783, and sail-sg/understand-r1-zero",
    data="yours",
    numbers={
        "groups_per_step": Number(128, "examples/qwen2.5-math-7b.sh: rollout_batch_size 128"),
        "passes": Number(1, "table 6: inner proximal update epoch 1"),
        "minibatches": Number(8, "examples/qwen2.5-math-7b.sh: train_batch_size 128, of 128 x 8 completions"),
        "sampling.group_size": Number(8, "table 6"),
        "sampling.temperature": Number(1.0, "table 6"),
        "sampling.max_new_tokens": Number(3000, "table 6"),
        "loss.advantage": Number("dr_grpo", "3.2: r - mean"),
        "loss.drop_zero_variance": Number(False, "their advantage is 0; the mean is over a fixed number all the same"),
        "loss.old_logps": Number("recomputed", "the policy as the sampling of a batch ends"),
        "loss.surrogate": Number("clip", "3.1"),
        "loss.clip": Number(0.2, "table 6"),
        "loss.mean": Number("constant", "3.2 and listing 1: a constant, the generation budget"),
        "loss.beta": Number(0.0, "table 6: KL loss coefficient 0"),
        "optimizer.lr": Number(1e-6, "table 6: constant 1e-6"),
        "optimizer.betas": Number((0.9, 0.95), "table 6"),
        "optimizer.weight_decay": Number(0.0, "table 6"),
        "optimizer.clip_norm": Number(1.0, "table 6"),
    },
    deviations=(AT_ONCE,),
    unpublished=("steps",),
)

GSPO = Preset(
    name="gspo",
    summary="one ratio a completion, clipped very narrowly",
    origin="Group Sequence Policy Optimization, arXiv 2507.18071",
    data="yours",
    numbers={
        "minibatches": Number(4, "5.1: each batch of rollout data is partitioned into four mini-batches"),
        "loss.advantage": Number("outcome", "equation 6"),
        "loss.drop_zero_variance": Number(False, "equation 5: every completion counts in the mean"),
        "loss.old_logps": Number("recomputed", "equation 7: the policy that sampled"),
        "loss.surrogate": Number("clip", "equation 5"),
        "loss.ratio": Number("sequence", "equation 7"),
        "loss.clip": Number(3e-4, "5.1: left clipping range 3e-4"),
        "loss.clip_high": Number(4e-4, "5.1: right clipping range 4e-4"),
        "loss.mean": Number("sequence_mean", "equation 5"),
        "loss.beta": Number(0.0, "2: the KL is left out, as no matter of the paper"),
    },
    deviations=(AT_ONCE,),
    unpublished=("groups_per_step", "sampling.group_size", "sampling.max_new_tokens", "optimizer.lr", "steps"),
)

CISPO = Preset(
    name="cispo",
    summary="truncated ratios as weights: no token loses its gradient",
    origin="MiniMax-M1, arXiv 2506.13585",
    data="yours",
    numbers={
        "groups_per_step": Number(16, "as many as the updates need", "The paper does not tell its batch."),
        "minibatches": Number(16, "3.1: 16 rounds of off-policy updates per generation batch"),
        "loss.advantage": Number("outcome", "equation 2"),
        "loss.drop_zero_variance": Number(True, "3.1: dynamic sampling, as DAPO"),
        "loss.old_logps": Number("recomputed", "equation 4: the policy that sampled"),
        "loss.surrogate": Number("cispo", "equation 4"),
        "loss.ratio_max": Number(
            5.0,
            "ScaleRL, arXiv 2510.13786: 5",
            "MiniMax-M1 has an upper bound, and does not tell which.",
        ),
        "loss.mean": Number("token_mean", "equation 4"),
        "loss.beta": Number(0.0, "3.1: no KL penalty"),
        "optimizer.betas": Number((0.9, 0.95), "3.2: beta1 = 0.9, beta2 = 0.95"),
    },
    deviations=(
        AT_ONCE,
        "Section 3.1 takes over DAPO's dynamic sampling and length penalty: --sampling.max-resamples 9, "
        "--rewards accuracy soft_overlong.",
        "Section 3.2 sets AdamW's eps to 1e-15; here it is 1e-8.",
    ),
    unpublished=("sampling.group_size", "sampling.max_new_tokens", "optimizer.lr", "steps"),
)

REINFORCE_PLUS_PLUS = Preset(
    name="reinforce++",
    summary="KL in each token's reward, returns standardised over the batch",
    origin="REINFORCE++, arXiv 2501.03262, and OpenRLHF's train_reinforce_llama_ray_hybrid_engine.sh",
    data="yours",
    numbers={
        "groups_per_step": Number(1024, "OpenRLHF: rollout_batch_size 1024"),
        "passes": Number(1, "OpenRLHF: max_epochs 1"),
        "minibatches": Number(8, "OpenRLHF: train_batch_size 128, of 1024"),
        "sampling.group_size": Number(1, "OpenRLHF: n_samples_per_prompt 1"),
        "sampling.max_new_tokens": Number(1024, "OpenRLHF: generate_max_len 1024"),
        "loss.advantage": Number("reinforce++", "return-to-go less the KL, standardised over the batch"),
        "loss.drop_zero_variance": Number(False, "the baseline is the batch's, so that a group of one trains"),
        "loss.old_logps": Number("recomputed", "OpenRLHF computes them once for each rollout batch"),
        "loss.surrogate": Number("clip", "PPO's clipping"),
        "loss.clip": Number(0.2, "OpenRLHF: eps_clip = 0.2"),
        "loss.mean": Number("token_mean", "OpenRLHF: the mean over tokens"),
        "loss.beta": Number(1e-4, "OpenRLHF: init_kl_coef 1e-4"),
        "loss.kl": Number("k1", "log of the ratio to the reference"),
        "loss.kl_in": Number("reward", "in the reward, token by token"),
        "optimizer.lr": Number(5e-7, "OpenRLHF: actor_learning_rate 5e-7"),
    },
    deviations=(AT_ONCE,),
    unpublished=("optimizer.betas", "optimizer.clip_norm", "steps"),
)
