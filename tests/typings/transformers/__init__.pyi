# ruff: noqa: F403
"""For pyright: the names that we import from transformers. Its own `__init__` imports all 500 families of models."""

from typing import Any

from transformers.cache_utils import Cache as Cache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig as ContinuousBatchingConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList as LogitsProcessorList
from transformers.generation.logits_process import MinPLogitsWarper as MinPLogitsWarper
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor as RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import TopKLogitsWarper as TopKLogitsWarper
from transformers.generation.logits_process import TopPLogitsWarper as TopPLogitsWarper
from transformers.hf_argparser import HfArgumentParser as HfArgumentParser
from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import *
from transformers.models.auto.image_processing_auto import AutoImageProcessor as AutoImageProcessor
from transformers.models.auto.modeling_auto import *
from transformers.models.auto.processing_auto import AutoProcessor as AutoProcessor
from transformers.models.auto.tokenization_auto import *
from transformers.models.bert import *
from transformers.models.byt5.tokenization_byt5 import ByT5Tokenizer as ByT5Tokenizer
from transformers.models.cohere import *
from transformers.models.gemma import *
from transformers.models.gemma2 import *
from transformers.models.gemma3 import *
from transformers.models.gpt2 import *
from transformers.models.gpt_bigcode import *
from transformers.models.gpt_neox import *
from transformers.models.gptj import *
from transformers.models.granite import *
from transformers.models.llama import *
from transformers.models.mamba import *
from transformers.models.mamba2 import *
from transformers.models.mistral import *
from transformers.models.mixtral import *
from transformers.models.nanochat import *
from transformers.models.olmo2 import *
from transformers.models.phi import *
from transformers.models.phi3 import *
from transformers.models.qwen2 import *
from transformers.models.qwen2_vl import *
from transformers.models.qwen3 import *
from transformers.models.qwen3_moe import *
from transformers.models.stablelm import *
from transformers.optimization import get_scheduler as get_scheduler
from transformers.processing_utils import ProcessorMixin as ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer_callback import EarlyStoppingCallback as EarlyStoppingCallback
from transformers.trainer_callback import PrinterCallback as PrinterCallback
from transformers.trainer_callback import ProgressCallback as ProgressCallback
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.trainer_callback import TrainerControl as TrainerControl
from transformers.trainer_callback import TrainerState as TrainerState
from transformers.utils.quantization_config import BitsAndBytesConfig as BitsAndBytesConfig

__version__: str

# Of classes that are imported when they are looked up.
FEATURE_EXTRACTOR_MAPPING: Any
IMAGE_PROCESSOR_MAPPING: Any
PROCESSOR_MAPPING: Any
VIDEO_PROCESSOR_MAPPING: Any
