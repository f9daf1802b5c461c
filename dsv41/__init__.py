"""DeepSeek-V4.1: single-pass hyper-connections, compressed sparse attention and hashed n-gram memory."""

from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41Config, DeepseekV41TextConfig, DeepseekV41VisionConfig
from dsv41.model import DeepseekV41ForCausalLM

__all__ = [
    "BackendConfig",
    "DeepseekV41Config",
    "DeepseekV41ForCausalLM",
    "DeepseekV41TextConfig",
    "DeepseekV41VisionConfig",
]
