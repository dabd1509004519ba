"""The error of wrong calls to the block manager. Being short of blocks is a result, not an error."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from kvframe.errors import KVFrameError


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class BlockError(KVFrameError, ValueError):
    """A call named a slot, a block or a token count that cannot be right; nothing was changed."""

    kind: ClassVar[str] = "blocks"
    what: str
    value: Any
    rule: str

    def __str__(self) -> str:
        return f"{self.what} = {self.value!r}: {self.rule}."


def not_held(block: int) -> BlockError:
    """The error for a block that is given back and that nobody holds."""
    return BlockError(what="block", value=block, rule="nobody holds it, so it cannot be given back")
