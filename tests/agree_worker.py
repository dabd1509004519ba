"""One rank of tests/test_agree.py, a process of its own: every scenario in turn, its outcome as a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any
from unittest.mock import patch

from torch import distributed

from kvframe import EngineConfig, FullAttentionSpec, PluginHost
from kvframe.errors import KVFrameError
from kvframe.planning import agree
from kvframe_sliding_window import SlidingWindowSpec

MIB = 1 << 20
RANK = int(os.environ["RANK"])
ENGINE = EngineConfig(max_model_len=4096)
SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


def layers(*numbers: int) -> dict[str, Any]:
    """Every third layer is full attention, the others slide."""
    full, sliding = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=512)
    return {f"layers.{n}.attn": full if n % 3 == 2 else sliding for n in numbers}


@contextmanager
def version_of(distribution: str, version: str) -> Iterator[None]:
    """In this process another version of a distribution is installed."""
    real = metadata.PathDistribution.version.fget  # type: ignore[attr-defined]

    def changed(self: metadata.PathDistribution) -> str:
        return version if self.name == distribution else str(real(self))

    with patch.object(metadata.PathDistribution, "version", property(changed)):
        yield


def equal() -> Any:
    return agree(layers(*range(6)), engine=ENGINE, memory=512 * MIB)


def less_memory() -> Any:
    return agree(layers(*range(6)), engine=ENGINE, memory=(512 if RANK != 2 else 300) * MIB)


def pipeline() -> Any:
    """Two stages of two ranks; layers in another order and other layers must not matter to the fingerprint."""
    own = range(6) if RANK < 2 else range(6, 12)
    return agree(layers(*own), engine=ENGINE, memory=(512 + RANK) * MIB)


def too_little() -> Any:
    return agree(layers(*range(6)), engine=ENGINE, memory=(512 if RANK != 1 else 8) * MIB)


def missing_plugin() -> Any:
    disabled = {"KVFRAME_DISABLE_PLUGINS": "kvframe-sliding-window"} if RANK == 3 else {}
    with patch.dict(os.environ, disabled):
        return agree(layers(*range(6)), engine=ENGINE, memory=512 * MIB, host=PluginHost())


def other_version() -> Any:
    with version_of("kvframe-sliding-window", "9.9" if RANK == 1 else "0.1.0"):
        return agree(layers(*range(6)), engine=ENGINE, memory=512 * MIB, host=PluginHost())


def other_limits() -> Any:
    engine = EngineConfig(max_model_len=4096 if RANK else 8192)
    return agree(layers(*range(6)), engine=engine, memory=512 * MIB)


def other_pools() -> Any:
    pools = {"host": 1024 * MIB} if RANK != 3 else None
    return agree(layers(*range(6)), engine=ENGINE, memory=512 * MIB, pools=pools)


def other_spec() -> Any:
    specs = layers(*range(6))
    if RANK == 2:
        specs["layers.2.attn"] = FullAttentionSpec(**SHAPE | {"head_size": 64})
    return agree(specs, engine=ENGINE, memory=512 * MIB)


def overlapping_layers() -> Any:
    return agree(layers(*range(6 if RANK else 7)), engine=ENGINE, memory=512 * MIB)


def unreadable_layer() -> Any:
    specs = layers(*range(6)) | ({"odd": object()} if RANK == 1 else {})
    return agree(specs, engine=ENGINE, memory=512 * MIB)


def smaller_group() -> Any:
    """Only ranks 1 and 3 plan, in a group of their own, in which they are ranks 0 and 1."""
    group = distributed.new_group([1, 3])
    return agree(layers(*range(6)), engine=ENGINE, memory=(300 + RANK) * MIB, group=group)


SCENARIOS: tuple[Callable[[], Any], ...] = (
    equal,
    less_memory,
    pipeline,
    too_little,
    missing_plugin,
    other_version,
    other_limits,
    other_pools,
    other_spec,
    overlapping_layers,
    unreadable_layer,
    smaller_group,
)


def outcome(scenario: Callable[[], Any]) -> dict[str, Any]:
    try:
        found = scenario()
    except KVFrameError as error:
        return {"error": error.as_dict()}
    return {
        "fingerprint": found.fingerprint,
        "stage": found.stage,
        "slabs": found.config.num_blocks,
        "slab_bytes": found.config.pools["device"].slab_bytes,
        "layers": sorted(layer for group in found.config.groups for layer in group.layer_specs),
    }


def main() -> None:
    try:
        early = outcome(equal)
        distributed.init_process_group("gloo")
        outcomes = {scenario.__name__: outcome(scenario) for scenario in SCENARIOS}
        distributed.destroy_process_group()
    finally:
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"no_group": early, **outcomes}, default=str))


if __name__ == "__main__":
    main()
