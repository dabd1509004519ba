"""PagedCache: a transformers Cache whose keys, values and states lie in kvframe's blocks."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, TypeVar

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from kvframe_transformers.errors import CacheStateError
from kvframe_transformers.roles import Roles
from kvframe_transformers.session import Session
from kvframe_transformers.statistics import PoolStatistics

Self = TypeVar("Self", bound="_Paged")


class _Paged:
    """What both caches do with all layers at once."""

    _session: Session
    _roles: Roles

    def _own(self, session: Session, roles: Roles) -> None:
        self._session, self._roles = session, roles
        weakref.finalize(self, session.engine.abandon, session)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """A second cache with the same tokens in the same pool: whole blocks are shared, not copied."""
        kind: Any = type(self)
        twin: Self = kind(self._session.twin(), self._roles)
        return twin

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The sequences become those with these indices; whole blocks are shared, not copied."""
        self._session.select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences."""
        self._session.select(torch.arange(self._session.batch)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._session.select([at for at in range(self._session.batch) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last columns back.

        Args:
            tokens_to_remove: how many, negative; 0 only lets go what past recording kept.

        Raises:
            ValueError: the number is positive, as in transformers.
            CacheStateError: what the rest would read is gone, or the model has recurrent states.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number"
            )
        if tokens_to_remove and self._session.engine.state_groups:
            raise CacheStateError(
                what="recurrent states cannot go back", advice="Make a new cache for the shorter text"
            )
        self._session.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens, and give their blocks back.

        Raises:
            CacheStateError: the cache is closed.
        """
        self._session.reset()
        super().reset()  # type: ignore[misc]

    def statistics(self) -> PoolStatistics:
        """What the cache's pool holds."""
        return self._session.engine.statistics()

    def close(self) -> None:
        """Give all blocks back; also done when the cache is garbage."""
        self._session.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class PagedCache(_Paged, Cache):  # type: ignore[misc]
    """A model's cache in blocks of a pool. Make one with `for_model`, or ask a `PagedCachePool` for one.

    Args:
        session: the batch's rows in a pool.
        roles: what each layer of the model keeps.
    """

    def __init__(self, session: Session, roles: Roles) -> None:
        super().__init__(layers=roles.layers(session))
        self._own(session, roles)

    @classmethod
    def for_model(
        cls,
        model: Any,
        memory: int | str | None = None,
        *,
        max_batch_size: int | None = None,
        max_model_len: int | None = None,
        cache_dtype: str = "auto",
        block_size: int = 16,
    ) -> Cache:
        """A cache with a pool of its own, for one batch: pass it to `model.generate` as `past_key_values`.

        Arguments and errors are those of `PagedCachePool.for_model`. For an encoder-decoder model it is a
        `PagedEncoderDecoderCache`.
        """
        from kvframe_transformers.pool import PagedCachePool

        pool = PagedCachePool.for_model(
            model,
            memory,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            cache_dtype=cache_dtype,
            block_size=block_size,
            prefix_caching=False,
        )
        return pool.cache()


class PagedEncoderDecoderCache(_Paged, EncoderDecoderCache):  # type: ignore[misc]
    """The caches of an encoder-decoder model: one for the decoder's own tokens, one for the encoder's output.

    Args:
        session: the batch's rows in a pool.
        roles: what each layer of the model keeps.
    """

    def __init__(self, session: Session, roles: Roles) -> None:
        own, cross = PagedCache(session, roles), Cache(layers=roles.cross_layers(session))
        super().__init__(own, cross)
        self._own(session, roles)
