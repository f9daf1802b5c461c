"""Released ``config.json``: text and vision configurations in one file, and checks of misplaced fields."""

from __future__ import annotations

import copy
import os
from typing import Any, ClassVar

from transformers import PretrainedConfig

from dsv41.config.checks import is_int, refuse_other_model, reject_misspelt, require, require_dtypes
from dsv41.config.fields import POSITIONS, VISION_RULES, Real, check_base_keys, check_fields, require_shallow, shown
from dsv41.config.text import BASE_FIELDS_OF_OURS, BASE_KEYS, METADATA_FIELDS, TEXT_FIELDS, DeepseekV41TextConfig


class DeepseekV41VisionConfig(PretrainedConfig):
    """Configuration of the vision tower (ARCHITECTURE 10), by default the released one; without layers, no tower."""

    model_type = "deepseek_v41_vision"
    base_config_key = "vision_config"

    def __init__(
        self,
        *,
        num_hidden_layers: int = 32,
        hidden_size: int = 1024,
        num_attention_heads: int = 16,
        intermediate_size: int = 2816,
        patch_size: int = 14,
        rope_theta: float = 10000.0,
        downsample_ratio: int = 3,
        max_image_tokens: int = 1024,
        min_pixels: int = 295936,
        max_wh_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in list(locals().items()):
            if name not in ("self", "kwargs", "__class__"):
                setattr(self, name, value)
        refuse_other_model(kwargs.pop("model_type", self.model_type), self.model_type)
        require_dtypes(kwargs)
        reject_misspelt(set(kwargs) - BASE_KEYS, VISION_FIELDS, type(self).__name__)
        check_base_keys(kwargs, type(self))
        check_fields(VISION_RULES, self)
        if max_wh_ratio is not None:
            Real(0, 1e6, above=True).check("max_wh_ratio", max_wh_ratio)
        super().__init__(**kwargs)


VISION_FIELDS = frozenset({*VISION_RULES, "max_wh_ratio"})


def _group(field: str, value: Any, kind: type[PretrainedConfig]) -> Any:
    """Nested configuration from its fields; None and finished configurations are returned unchanged."""
    if value is None or isinstance(value, kind):
        return value
    require(isinstance(value, dict), field, f"must be a group of fields or null, got {shown(value)}")
    require("self" not in value, "self", f"no field of {kind.__name__}")
    return kind(**value)


class DeepseekV41Config(PretrainedConfig):
    """Released configuration: text and vision models nested.

    Args:
        text_config: `DeepseekV41TextConfig` or its fields; None takes the released values.
        vision_config: `DeepseekV41VisionConfig` or its fields; None is a text-only model.
        image_token_id: Id at every position of an image span.
        **kwargs: Further keys of `PretrainedConfig`, kept as they are. `quantization_config` describes stored
            weights and has no effect: the loader reads the files.

    Raises:
        ValueError: `model_type` is another model's, `image_token_id` is negative, a nested field is wrong, or a field
            of the text model stands outside `text_config` with another value.
    """

    model_type = "deepseek_v41"
    # Declared as classes; transformers resolves them into its own spec objects when the class is made.
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "text_config": DeepseekV41TextConfig,
        "vision_config": DeepseekV41VisionConfig,
    }

    def __init__(
        self,
        *,
        text_config: DeepseekV41TextConfig | dict[str, Any] | None = None,
        vision_config: DeepseekV41VisionConfig | dict[str, Any] | None = None,
        image_token_id: int = 129264,
        **kwargs: Any,
    ) -> None:
        # Copies, since later edits of the caller's objects would not be checked.
        text = copy.deepcopy(_group("text_config", text_config, DeepseekV41TextConfig))
        vision = copy.deepcopy(_group("vision_config", vision_config, DeepseekV41VisionConfig))
        self.text_config = text or DeepseekV41TextConfig()
        self.vision_config = vision or DeepseekV41VisionConfig(num_hidden_layers=0)
        self.image_token_id = image_token_id
        refuse_other_model(kwargs.pop("model_type", self.model_type), self.model_type)
        require_dtypes(kwargs)
        self._refuse_misplaced(kwargs)
        reject_misspelt(set(kwargs) - BASE_KEYS, ("text_config", "vision_config", "image_token_id"), "the config")
        require(
            is_int(image_token_id) and 0 <= image_token_id <= POSITIONS,
            "image_token_id",
            f"must be an integer of at least 0 and at most {POSITIONS}, got {shown(image_token_id)}",
        )
        check_base_keys(kwargs, type(self))
        super().__init__(**kwargs)

    def _refuse_misplaced(self, given: dict[str, Any]) -> None:
        """Raise for text fields outside `text_config` that differ from it: a flat file would get released sizes."""
        rope = self.text_config.rope_parameters
        for name in ("rope_scaling", "rope_parameters"):
            repeated = given.pop(name, None)
            repeated = {} if repeated is None else repeated
            require(isinstance(repeated, dict), name, f"must be a group of settings or null, got {shown(repeated)}")
            repeated = dict(repeated)
            if "type" in repeated:
                repeated["rope_type"] = repeated.pop("type")
            require(
                repeated.items() <= rope.items(), name, f"{shown(repeated)} contradicts text_config, which has {rope!r}"
            )
        for name in sorted(set(given) & (TEXT_FIELDS - set(METADATA_FIELDS) | {"tie_word_embeddings"})):
            nested = getattr(self.text_config, name)
            require(
                given[name] == nested,
                name,
                f"{shown(given[name])} contradicts text_config, which has {nested!r}; fields of the text model belong "
                "there",
            )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of a file as in the base class; a file of another model is refused, where the base class only warns.

        Raises:
            OSError: No such file, folder or repository, or no ``config.json`` in it.
            ValueError: The file is another model's.
        """
        place = os.fspath(pretrained_model_name_or_path)
        if os.path.isabs(place) and not os.path.exists(place):
            raise FileNotFoundError(f"{place}: no such file or folder")
        try:
            found, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        except RecursionError:
            raise ValueError(f"{place}: config.json is nested too deeply") from None
        except (TypeError, AttributeError):  # no object: transformers sets keys in whatever it has read
            raise ValueError(f"{place}: config.json must hold a group of fields") from None
        require(isinstance(found, dict), place, "config.json must hold a group of fields")
        if not found:
            raise FileNotFoundError(f"{place}: no config.json in it")
        require_shallow(found)
        require("self" not in found, "self", "no field of a configuration")
        refuse_other_model(found.get("model_type"), cls.model_type)
        return found, unused

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Configuration of a folder or repository, as in the base class, with the place in error messages.

        Raises:
            OSError: See `get_config_dict`.
            ValueError: A field is wrong; begins with its name and ends with the place.
        """
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{error} (config.json of {os.fspath(pretrained_model_name_or_path)})") from error

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Configuration from a dictionary, as in the base class; single fields are changed by ``text_config={...}``.

        Raises:
            ValueError: A keyword is a field of the text model, which the base class would silently ignore.
        """
        for name in sorted(TEXT_FIELDS & set(kwargs) - set(BASE_FIELDS_OF_OURS)):
            raise ValueError(f"{name}: a field of the text model; pass text_config={{{name!r}: {kwargs[name]!r}}}")
        return super().from_dict(config_dict, **kwargs)

    def get_text_config(self, *args: Any, **kwargs: Any) -> DeepseekV41TextConfig:
        """Nested text configuration (transformers reads vocabulary and hidden size through it)."""
        return self.text_config
