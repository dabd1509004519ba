"""The block manager: who holds which block of the KV cache. It knows groups by their lifetimes only."""

from kvframe.blocks.common import CommonPrefix, common_prefix
from kvframe.blocks.config import BlockConfig, GroupBlocks
from kvframe.blocks.errors import BlockError
from kvframe.blocks.from_plan import block_config
from kvframe.blocks.hashing import ExtraKeys, MultiModalItem, TokenChain
from kvframe.blocks.hits import Hit
from kvframe.blocks.manager import KVCacheManager
from kvframe.blocks.pins import Pin, Pins
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.queues import EvictionPolicy, FreeQueue
from kvframe.blocks.quotas import Quota, Quotas
from kvframe.blocks.requests import Admission, BlockRequest
from kvframe.blocks.results import Copy, Deferred, HitLimit, Refused, Served, StepResult
from kvframe.blocks.slabs import SlabPool
from kvframe.blocks.state import chunk_stops
from kvframe.blocks.tables import BlockTables
from kvframe.blocks.tenants import TenantManager

__all__ = [
    "Admission",
    "BlockConfig",
    "BlockError",
    "BlockPool",
    "BlockRequest",
    "BlockTables",
    "CommonPrefix",
    "Copy",
    "Deferred",
    "EvictionPolicy",
    "ExtraKeys",
    "FreeQueue",
    "GroupBlocks",
    "Hit",
    "HitLimit",
    "KVCacheManager",
    "MultiModalItem",
    "Pin",
    "Pins",
    "PrefixCache",
    "Quota",
    "Quotas",
    "Refused",
    "Served",
    "SlabPool",
    "StepResult",
    "TenantManager",
    "TokenChain",
    "block_config",
    "chunk_stops",
    "common_prefix",
]
