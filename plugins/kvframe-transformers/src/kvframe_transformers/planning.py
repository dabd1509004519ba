"""From a model's config to its specs, a plan for a budget, and the block manager's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvframe import EngineConfig, KVCacheConfig, PluginHost, load_plugins, plan
from kvframe.blocks import BlockConfig
from kvframe.blocks.from_plan import block_config
from kvframe.dtypes import CacheDType
from kvframe.errors import InsufficientMemoryError, UsageError
from kvframe.models import ModelSpecs, encoder_positions, max_model_len, model_specs, read_config
from kvframe.planning import Plan
from kvframe.planning.inverse import largest_len, memory_for_requests
from kvframe.planning.pools import requests_at
from kvframe.readers import ReadOptions

BLOCKS_PER_STEP = 4  # a prompt is taken in so many blocks at a time where layers give blocks back
DEFAULT_ROWS = 256  # sequences at once, where nobody says how many
UNLIMITED = 1 << 20  # tokens; stands for "any length" where a model keeps states only
STATE_DTYPE = "float32"  # holds what any state is computed in, exactly


@attrs.frozen(kw_only=True)
class ModelPlan:
    """A model's caches, planned.

    Args:
        model: the specs, and the layers that they belong to.
        plan: the plan.
        engine: the limits that it was made for; lengths are tokens.
        blocks: the block manager's configuration.
        host: the plugins.
        cache_dtype: how tokens are stored.
    """

    model: ModelSpecs
    plan: Plan
    engine: EngineConfig
    blocks: BlockConfig
    host: PluginHost
    cache_dtype: CacheDType

    @property
    def config(self) -> KVCacheConfig:
        """Pools, groups and placements."""
        return self.plan.config


def plan_model(
    config: Any,
    dtype: str,
    *,
    memory: int | str | None,
    max_batch_size: int | None,
    max_model_len: int | None,
    cache_dtype: str,
    block_size: int,
    prefix_caching: bool,
    max_encoder_len: int | None = None,
    host: PluginHost | None = None,
) -> ModelPlan:
    """Plan the caches of a transformers model.

    Args:
        config: the model's PreTrainedConfig.
        dtype: name of the model's element dtype.
        memory: bytes, or text such as "2GiB"; None: enough for max_batch_size sequences of max_model_len tokens.
        max_batch_size: sequences at once; None: as many as fit, and 1 where the memory is to be found.
        max_model_len: tokens of the longest sequence; None: the config's limit, or what fits if that is less.
        cache_dtype: a cache dtype of kvframe.
        block_size: tokens.
        prefix_caching: blocks are found by later prompts, so that states are kept at block borders.
        max_encoder_len: positions of the encoder; None: the config's limit.
        host: the plugins; None: the installed ones.

    Raises:
        MissingPluginError: a layer is of a kind that no plugin provides; has the pip command.
        InsufficientMemoryError: one sequence does not fit; names the largest length that does.
        UsageError: a length is needed that neither the config nor the caller gives.
    """
    host = host or load_plugins()
    # an encoder-decoder's own config says what its decoder keeps
    decoder = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    source = read_config(decoder.to_dict())
    known = max_model_len or _config_length(source)
    longest = known or UNLIMITED
    encoder = _encoder_length(config, source, max_encoder_len, longest)
    stored = host.cache_dtypes.get(cache_dtype)
    options = ReadOptions(
        block_size=block_size,
        cache_dtype=stored,
        model_dtype=dtype,
        max_model_len=longest,
        state_dtype=STATE_DTYPE,
        caching=prefix_caching,
    )
    model = model_specs(source, host, options)
    if known is None and any(spec.tokens_per_state > 0 for spec in model.specs.values()):
        rule = f"is needed: {source.model_type}'s config has no limit"
        raise UsageError(option="max_model_len", value=None, rule=rule)
    engine = EngineConfig(
        max_model_len=longest,
        max_in_flight_tokens=min(longest, BLOCKS_PER_STEP * block_size),
        max_encoder_tokens=encoder,
        max_num_seqs=max_batch_size,
        state_cache_mode="align" if prefix_caching else "none",
        prefix_caching=prefix_caching,
    )
    made, engine = _planned(model, engine, host, memory, max_batch_size or 1, fit=max_model_len is None)
    rows = max_batch_size or DEFAULT_ROWS
    # parked conversations of a pool keep rows beside those that run
    limits: Mapping[str, Any] = {"max_requests": 2 * rows if prefix_caching else rows}
    blocks = block_config(made.config, engine, host=host, **limits)
    return ModelPlan(model=model, plan=made, engine=engine, blocks=blocks, host=host, cache_dtype=stored)


def _planned(
    model: ModelSpecs, engine: EngineConfig, host: PluginHost, memory: int | str | None, batch: int, fit: bool
) -> tuple[Plan, EngineConfig]:
    """The plan, and the limits with the length that it is made for."""

    def make(nbytes: int, length: int) -> Plan:
        limits = engine.with_max_model_len(length)
        return plan(model.specs, engine=limits, memory=nbytes, host=host, kinds=model.kinds)

    longest = engine.max_model_len
    if memory is None:
        nbytes = memory_for_requests(
            lambda nbytes: make(nbytes, longest),
            batch,
            lambda made: requests_at(made.config, engine=engine, host=host, length=longest),
        )
    else:
        nbytes = parse_memory(memory)
    try:
        return make(nbytes, longest), engine
    except InsufficientMemoryError as error:
        if not fit or not error.largest_fitting_len:
            raise
    longest = largest_len(lambda length: make(nbytes, length), longest)
    return make(nbytes, longest), engine.with_max_model_len(longest)


def _config_length(source: Any) -> int | None:
    longest = max_model_len(source) or source.get("n_positions", "max_seq_len")
    return int(longest) if longest else None


def _encoder_length(config: Any, source: Any, given: int | None, longest: int) -> int:
    if not config.is_encoder_decoder:
        return 0
    return given or encoder_positions(source) or longest


def parse_memory(memory: int | str) -> int:
    """Bytes of a number or a text such as "2GiB".

    Raises:
        UsageError: it is no size.
    """
    import click

    from kvframe.cli.options import parse_size

    try:
        return parse_size(memory)
    except click.BadParameter as error:
        raise UsageError(option="memory", value=memory, rule=error.message) from None
