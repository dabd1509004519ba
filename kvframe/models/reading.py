"""From a config.json to its layers: the decoder's fields, and the reader that knows how the file spells layers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvframe.errors import (
    HookError,
    KVFrameError,
    MissingPluginError,
    ModelConfigError,
    UnknownLayerKindError,
)
from kvframe.models.builtin import builtin_model_readers
from kvframe.models.providers import DISTRIBUTIONS, NEEDED_KINDS
from kvframe.plugins import PluginHost
from kvframe.readers import Layer, ModelConfig
from kvframe.spelling import OWN_NOTHING, common_layers, list_field

CONFIG_FILE = "config.json"
NESTED = "text_config"

# What a nested config inherits where it does not say it: facts about the checkpoint as a whole.
_INHERITED = ("model_type", "dtype", "torch_dtype")


def read_config(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """The decoder's fields of a model's config.

    Args:
        source: a config.json, a folder that holds one, or its content. Fields under `text_config` win over all others.

    Raises:
        ModelConfigError: no such file, not JSON, or no object.
    """
    if isinstance(source, Mapping):
        values, file = source, CONFIG_FILE
    else:
        path = Path(source)
        path = path / CONFIG_FILE if path.is_dir() else path
        values, file = _load(path), str(path)
    nested = values.get(NESTED)
    if nested is None:
        return ModelConfig(values=values, file=file)
    if not isinstance(nested, Mapping):
        raise ModelConfigError(file=file, field=NESTED, value=nested, rule="must be an object")
    inherited = {name: values[name] for name in _INHERITED if values.get(name) is not None}
    own = {name: value for name, value in nested.items() if value is not None or name not in inherited}
    return ModelConfig(values={**inherited, **own}, file=file)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise ModelConfigError(file=str(path), field="file", value=str(path), rule=rule) from error
    except ValueError as error:  # of the decoding, or of the JSON in it
        raise ModelConfigError(
            file=str(path), field="file", value=str(path), rule=f"is no JSON: {error}"
        ) from error
    if not isinstance(values, dict):
        rule = f"must hold an object of fields, not a {type(values).__name__}"
        raise ModelConfigError(file=str(path), field="file", value=str(path), rule=rule)
    return values


def model_dtype(config: ModelConfig) -> str:
    """Element dtype of the model's weights: the config's, else bfloat16.

    Raises:
        ModelConfigError: no dtype has that name.
    """
    return config.dtype("dtype", "torch_dtype") or "bfloat16"


def max_model_len(config: ModelConfig) -> int | None:
    """The longest request in tokens that the model was made for, None where its config does not say."""
    names = ("max_position_embeddings", "max_position_embedding", "max_target_positions")
    return config.integer(*names) if config.get(*names) is not None else None


def encoder_positions(config: ModelConfig) -> int | None:
    """The most positions that the model's encoder gives, None where it has none or its config does not say."""
    name = "max_source_positions"
    return config.integer(name) if config.get(name) is not None else None


def read_layers(config: ModelConfig, host: PluginHost) -> tuple[Layer, ...]:
    """The kinds of every layer, by the reader of its model type, else by the common spellings.

    Raises:
        ModelConfigError: a field is missing, wrong, or of the wrong length.
        UnknownLayerKindError: a layer of a kind that nobody knows.
        MissingPluginError: a layer of a kind whose plugin is not in use.
    """
    model_type = config.model_type
    reader = host.model_readers.get(model_type) or builtin_model_readers().get(model_type)
    if reader is None and model_type in NEEDED_KINDS:
        raise missing_kind(NEEDED_KINDS[model_type], host)
    if reader is None:
        layers: Sequence[Layer] = common_layers(config)
    else:
        try:
            layers = reader.read(config)
        except KVFrameError:
            raise
        except Exception as error:  # a reader is a plugin's code: its owner is named
            raise reader_error("kvframe_model_readers", model_type, host, error) from error
    known = {*host.layer_readers, *OWN_NOTHING}
    for layer in layers:
        for kind in layer.kinds:
            if kind not in known:
                raise _unread_kind(kind, layer, config, host)
    return tuple(layers)


def _unread_kind(kind: str, layer: Layer, config: ModelConfig, host: PluginHost) -> KVFrameError:
    if kind in DISTRIBUTIONS:
        return missing_kind(kind, host)
    return UnknownLayerKindError(
        file=config.file,
        field=list_field(config),
        value=kind,
        layer=layer.index,
        known=sorted({*host.layer_readers, *DISTRIBUTIONS}),
        rule="must be a known layer kind",
    )


def missing_kind(kind: str, host: PluginHost) -> MissingPluginError:
    """The error for a layer kind whose plugin is not in use: which one it is, and why if it was set aside."""
    distribution = DISTRIBUTIONS[kind]
    record = host.set_aside(distribution)
    return MissingPluginError(
        wanted=f"layer kind {kind!r}",
        distribution=distribution,
        needed_by="model",
        reason=record.reason if record else None,
        remedy=record.remedy if record else None,
    )


def reader_error(hook: str, name: str, host: PluginHost, error: Exception) -> HookError:
    """The error of a reader that failed otherwise than by a typed error: says whose it is."""
    owners = (record.label for record in host.records if name in (*record.layer_kinds, *record.model_types))
    return HookError(
        hook=hook,
        plugin=next(owners, "kvframe"),
        reason=f"its reader of {name!r} raised {type(error).__name__}: {error}",
    )
