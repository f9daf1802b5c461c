"""Configuration: the text model, the released nested file, and the rules that hold for both."""

from dsv41.config.released import VISION_FIELDS, DeepseekV41Config, DeepseekV41VisionConfig
from dsv41.config.text import (
    IGNORE_INDEX,
    METADATA_FIELDS,
    SWITCHES,
    TEXT_FIELDS,
    TRAINING_FIELDS,
    DeepseekV41TextConfig,
)

__all__ = [
    "IGNORE_INDEX",
    "METADATA_FIELDS",
    "SWITCHES",
    "TEXT_FIELDS",
    "TRAINING_FIELDS",
    "VISION_FIELDS",
    "DeepseekV41Config",
    "DeepseekV41TextConfig",
    "DeepseekV41VisionConfig",
]
