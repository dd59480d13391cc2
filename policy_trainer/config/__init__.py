"""Settings of every command: one file for each group of settings."""

from policy_trainer.config.commands import (
    ENV_PREFIX,
    ENVIRONMENT,
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
from policy_trainer.config.loss import EntropyConfig, LossConfig, MaskConfig
from policy_trainer.config.sampling import (
    HttpRewardConfig,
    JudgingConfig,
    PenaltyConfig,
    RewardModelConfig,
    SamplingConfig,
    TurnsConfig,
    VllmConfig,
)
from policy_trainer.config.sections import (
    CheckpointConfig,
    EvalEvaluationConfig,
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    ReferenceConfig,
    ReferenceSource,
    SamplesConfig,
)
from policy_trainer.config.supervised import RewardTrainingConfig, SftConfig
from policy_trainer.config.train import DoctorConfig, ReplayConfig, TrainConfig
