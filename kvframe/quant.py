"""What a cache dtype's name means for kernels (contract 3.1, 3.2)."""

from __future__ import annotations

from typing import Any

from kvframe.dtypes import KVQuantMode
from kvframe.plugins import PluginHost, load_plugins


def get_kv_quant_mode(name: Any, host: PluginHost | None = None) -> KVQuantMode:
    """The quantisation mode of the cache dtype of that name.

    Args:
        name: as on the command line ("fp8_e4m3"), or a torch dtype.
        host: whose cache dtypes count; None: the installed plugins.

    Raises:
        UnknownCacheDTypeError: nobody claims the name. It is never taken for "not quantised".
    """
    return (host or load_plugins()).cache_dtypes.get(name).mode


def kv_cache_uses_per_token_head_scales(name: Any, host: PluginHost | None = None) -> bool:
    """Whether caches of that dtype keep one scale for each token and head in the cell.

    Raises:
        UnknownCacheDTypeError: nobody claims the name.
    """
    return get_kv_quant_mode(name, host).is_per_token_head
