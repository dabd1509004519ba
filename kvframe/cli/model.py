"""What `plan` and `inspect` share: their common options, and reading the model with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click

from kvframe.dtypes import CacheDType, ScaleStorage, element_size
from kvframe.errors import MissingScalesError, UsageError
from kvframe.models import ModelSpecs, max_model_len, model_dtype, model_specs
from kvframe.plugins import PluginHost
from kvframe.readers import ModelConfig, ReadOptions

F = Callable[..., Any]


def model_options(function: F) -> F:
    """The options that say how a model's cache is stored."""
    for option in reversed(
        (
            click.argument("config", type=click.Path(path_type=Path)),
            click.option(
                "--cache-dtype", default="auto", help="How token caches are stored; auto: the config's dtype."
            ),
            click.option(
                "--state-dtype", help="Element dtype of recurrent states; default: the config's own."
            ),
            click.option(
                "--tensor-parallel-size",
                "-tp",
                default=1,
                type=click.IntRange(1),
                show_default=True,
                help="Ranks.",
            ),
        )
    ):
        function = option(function)
    return function


def load_model(
    config: ModelConfig,
    host: PluginHost,
    *,
    cache_dtype: str,
    state_dtype: str | None,
    tensor_parallel_size: int,
    block_size: int = 16,
    longest: int | None = None,
    caching: bool = True,
) -> ModelSpecs:
    """Turn a config's layers into specs.

    Raises:
        ModelConfigError: a field in it cannot be right.
        MissingPluginError: a layer kind needs a plugin that is not in use.
        UnknownCacheDTypeError: nobody knows the cache dtype.
    """
    if state_dtype is not None:
        element_size(state_dtype)
    options = ReadOptions(
        block_size=block_size,
        cache_dtype=host.cache_dtypes.get(cache_dtype),
        model_dtype=model_dtype(config),
        max_model_len=longest or max_model_len(config) or block_size,
        state_dtype=state_dtype,
        tp=tensor_parallel_size,
        caching=caching,
    )
    return model_specs(config, host, options)


def length_of(config: ModelConfig, given: int | None) -> int:
    """The maximum length to plan for, tokens.

    Raises:
        UsageError: neither the option nor the config has one.
    """
    length = given or max_model_len(config)
    if length is None:
        rule = f"is needed: {config.file} has no max_position_embeddings"
        raise UsageError(option="--max-model-len", value=None, rule=rule)
    return length


@attrs.frozen(kw_only=True)
class ScaleChoice:
    """What is known of a cache dtype's scales, and what to use."""

    in_checkpoint: str
    policy: str | None

    def check(self, dtype: CacheDType) -> tuple[str, ...]:
        """Warnings about the scales.

        Raises:
            MissingScalesError: the checkpoint has none and no policy says what to use.
        """
        if dtype.scales is not ScaleStorage.CHECKPOINT:
            return ()
        if self.policy == "unit":
            return (
                f"cache dtype {dtype.name}: scales are 1.0; values beyond the format's range are clipped",
            )
        if self.policy == "computed":
            return ()
        if self.in_checkpoint == "no":
            raise MissingScalesError(cache_dtype=dtype.name)
        if self.in_checkpoint == "unknown":
            return (
                f"cache dtype {dtype.name} needs scales from the checkpoint, and nothing says that it has them: "
                f"give --scales-in-checkpoint yes, or a --scale-policy",
            )
        return ()
