"""The pool that no real one can beat: bytes without slabs or pages, the least recently used cached block goes first.

Every block costs what its layers need of it. Blocks of all groups stand in one queue; any bytes can become any block.
"""

from collections import OrderedDict
from contextlib import contextmanager
from unittest import mock

from kvframe.blocks import KVCacheManager
from kvframe.blocks.prefix import PrefixCache
from kvframe.simulate import case
from kvframe.simulate.meter import Meter


class BytewisePool:
    """A pool of the block manager with one id space a group, as many ids as bytes could ever fill.

    Args:
        pool_bytes: to share.
        block_bytes: of a block, by group.
        cache: the prefix cache, with one id space a group.
    """

    def __init__(self, pool_bytes, block_bytes, cache):
        self.block_bytes, self.cache = block_bytes, cache
        self.free_bytes = pool_bytes
        self.refs = [{} for _ in block_bytes]
        self.idle = OrderedDict()  # (group, block), the least recently used first
        self.idle_bytes = 0
        self.spare_ids = [list(range(pool_bytes // size, 0, -1)) for size in block_bytes]

    @property
    def num_free(self):
        return self.free_bytes + self.idle_bytes

    @property
    def num_held(self):
        return sum(map(len, self.refs))

    def free_for(self, group):
        return self.num_free // self.block_bytes[group]

    def missing(self, needs, hits=(), spare=0):
        wanted = sum(need * size for need, size in zip(needs, self.block_bytes, strict=True))
        for group, blocks in enumerate(hits):
            wanted += sum(self.block_bytes[group] for block in blocks if block not in self.refs[group])
        return max(0, wanted - self.num_free)

    def reserve(self, needs):
        pass

    def take(self, group, count):
        size = self.block_bytes[group]
        while self.free_bytes < count * size:
            (owner, block), _ = self.idle.popitem(last=False)
            self.idle_bytes -= self.block_bytes[owner]
            self.cache.drop_all(owner, [block])
            self._free(owner, block)
        self.free_bytes -= count * size
        blocks = [self.spare_ids[group].pop() for _ in range(count)]
        self.refs[group].update(dict.fromkeys(blocks, 1))
        return blocks

    def _free(self, group, block):
        self.spare_ids[group].append(block)
        self.free_bytes += self.block_bytes[group]

    def touch(self, group, blocks):
        for block in blocks:
            if block not in self.refs[group]:
                del self.idle[group, block]
                self.idle_bytes -= self.block_bytes[group]
            self.refs[group][block] = self.refs[group].get(block, 0) + 1

    def give_back(self, group, blocks):
        for block in blocks:
            self.refs[group][block] -= 1
            if self.refs[group][block]:
                continue
            del self.refs[group][block]
            if block in self.cache.index_of[group]:
                self.idle[group, block] = None
                self.idle_bytes += self.block_bytes[group]
            else:
                self._free(group, block)

    def retire(self, group, blocks):
        self.give_back(group, blocks)

    def check_ids(self, group, blocks):
        pass


class _Manager(KVCacheManager):
    """A manager whose pool knows bytes alone: those of the plan made last."""

    meter = None

    def make(self, config):
        meter = type(self).meter
        sizes = [meter.pool_bytes // size + 1 for size in meter.block_bytes]
        cache = PrefixCache(sizes, range(len(sizes)))
        return BytewisePool(meter.pool_bytes, meter.block_bytes, cache), cache


@contextmanager
def bytewise():
    """Inside, `run_case` runs in a pool that knows bytes alone."""
    planned = case.plan

    class Manager(_Manager):
        pass

    def plan(*args, **kwargs):
        made = planned(*args, **kwargs)
        Manager.meter = Meter.of(made.config)
        return made

    with mock.patch.object(case, "plan", plan), mock.patch.object(case, "KVCacheManager", Manager):
        yield
