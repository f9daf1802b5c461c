"""DeepSeek-V4.1: single-pass hyper-connections, compressed sparse attention and hashed n-gram memory.

Importing the package registers the model with transformers' automatic classes, `AutoConfig` and `AutoModelForCausalLM`.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41Config, DeepseekV41TextConfig, DeepseekV41VisionConfig
from dsv41.model import DeepseekV41ForCausalLM

# Importing this package selects this model, also where transformers has one of the same type.
AutoConfig.register(DeepseekV41Config.model_type, DeepseekV41Config, exist_ok=True)
AutoModelForCausalLM.register(DeepseekV41Config, DeepseekV41ForCausalLM, exist_ok=True)

__all__ = [
    "BackendConfig",
    "DeepseekV41Config",
    "DeepseekV41ForCausalLM",
    "DeepseekV41TextConfig",
    "DeepseekV41VisionConfig",
]
