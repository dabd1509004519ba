"""A KV cache for Hugging Face transformers whose storage is kvframe's: planned, paged, and shared between calls."""

from kvframe_transformers.cache import PagedCache, PagedEncoderDecoderCache
from kvframe_transformers.errors import CacheStateError, PoolFullError
from kvframe_transformers.pool import PagedCachePool
from kvframe_transformers.statistics import GroupStatistics, PoolStatistics

__all__ = [
    "CacheStateError",
    "GroupStatistics",
    "PagedCache",
    "PagedCachePool",
    "PagedEncoderDecoderCache",
    "PoolFullError",
    "PoolStatistics",
]
