"""Settings of every command: one file for each group of settings."""

from policy_trainer.config.commands import (
    ENV_PREFIX,
    INLINE,
    CommonConfig,
    DemoChoices,
    DemoConfig,
    DemoSetupConfig,
    EvalConfig,
    ExportConfig,
    RolloutConfig,
    RolloutLossConfig,
    RunConfig,
    WeightsPlace,
)
from policy_trainer.config.data import (
    ColumnsConfig,
    CountdownConfig,
    DataConfig,
    MixtureSource,
    PromptConfig,
    SourceConfig,
)
from policy_trainer.config.entropy import EntropyConfig
from policy_trainer.config.lora import LoraConfig
from policy_trainer.config.loss import LossConfig
from policy_trainer.config.masks import MaskConfig
from policy_trainer.config.reward_training import RewardTrainingConfig
from policy_trainer.config.rewards import HttpRewardConfig, JudgingConfig, PenaltyConfig, RewardModelConfig
from policy_trainer.config.sampling import SamplingConfig
from policy_trainer.config.sections import (
    CheckpointConfig,
    EvalEvaluationConfig,
    EvaluationConfig,
    OptimizerConfig,
    ReferenceConfig,
    ReferenceSource,
    SamplesConfig,
)
from policy_trainer.config.sft import SftConfig
from policy_trainer.config.train import DoctorConfig, PlanConfig, ReplayConfig, TrainConfig
from policy_trainer.config.vllm import SamplerName, VllmConfig

__all__ = [
    "ENV_PREFIX",
    "INLINE",
    "CheckpointConfig",
    "ColumnsConfig",
    "CommonConfig",
    "CountdownConfig",
    "DataConfig",
    "DemoChoices",
    "DemoConfig",
    "DemoSetupConfig",
    "DoctorConfig",
    "EntropyConfig",
    "EvalConfig",
    "EvalEvaluationConfig",
    "EvaluationConfig",
    "ExportConfig",
    "HttpRewardConfig",
    "JudgingConfig",
    "LoraConfig",
    "LossConfig",
    "MaskConfig",
    "MixtureSource",
    "OptimizerConfig",
    "PenaltyConfig",
    "PlanConfig",
    "PromptConfig",
    "ReferenceConfig",
    "ReferenceSource",
    "ReplayConfig",
    "RewardModelConfig",
    "RewardTrainingConfig",
    "RolloutConfig",
    "RolloutLossConfig",
    "RunConfig",
    "SamplerName",
    "SamplesConfig",
    "SamplingConfig",
    "SftConfig",
    "SourceConfig",
    "TrainConfig",
    "VllmConfig",
    "WeightsPlace",
]
