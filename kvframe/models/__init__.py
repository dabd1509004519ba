"""Models: a Hugging Face config.json to layers, layers to specs, and what they keep."""

from kvframe.models.facts import ModelBytes, inspect_model, model_bytes
from kvframe.models.reading import encoder_positions, max_model_len, model_dtype, read_config, read_layers
from kvframe.models.specs import ModelSpecs, model_specs

__all__ = [
    "ModelBytes",
    "ModelSpecs",
    "encoder_positions",
    "inspect_model",
    "max_model_len",
    "model_bytes",
    "model_dtype",
    "model_specs",
    "read_config",
    "read_layers",
]
