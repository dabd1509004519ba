"""PagedCachePool: one plan and its memory for many caches, with prefixes shared between them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvframe.errors import UsageError
from kvframe_transformers.cache import PagedCache, PagedEncoderDecoderCache
from kvframe_transformers.engine import Engine
from kvframe_transformers.planning import ModelPlan, plan_model
from kvframe_transformers.prefix import PrefixFinder, paddings, prompts
from kvframe_transformers.roles import Roles, read_roles
from kvframe_transformers.session import Session
from kvframe_transformers.statistics import PoolStatistics


class PagedCachePool:
    """Memory that many `generate` calls of one model share. Make one with `for_model`.

    A prompt that begins like an earlier one finds that beginning in cached blocks, and a conversation that goes on
    finds all of its tokens; the model is called for the rest only. Used by one thread at a time.

    Args:
        planned: the plan.
        roles: what each layer of the model keeps.
        engine: the pool's blocks.
        model: the model, for `prefill`.
    """

    def __init__(self, planned: ModelPlan, roles: Roles, engine: Engine, model: Any) -> None:
        self.planned = planned
        self._roles, self._engine = roles, engine
        self._model = weakref.ref(model)
        _watch(model)

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
        prefix_caching: bool = True,
    ) -> PagedCachePool:
        """Plan and allocate a pool.

        Args:
            model: a transformers model that generates text.
            memory: bytes, or text such as "2GiB"; None: what max_batch_size sequences of max_model_len tokens need.
            max_batch_size: sequences at once, beams included; None: as many as fit, and 1 where memory is None.
            max_model_len: tokens of the longest sequence; None: the config's limit, or what fits if that is less.
            cache_dtype: "auto" keeps the model's dtype; "fp8", "int8_per_token_head" and "int4_per_token_head" store
                keys and values in fewer bits. Recurrent states are always exact.
            block_size: tokens.
            prefix_caching: whether prompts find what earlier ones left.

        Raises:
            MissingPluginError: a layer is of a kind that no installed plugin provides; has the pip command.
            InsufficientMemoryError: one sequence does not fit; names the largest length that does.
            SequenceLimitError: the states of max_batch_size sequences do not fit; names how many do.
            UsageError: the arguments, or the model's layers, are nothing that can be served.
        """
        planned = plan_model(
            model.config,
            str(model.dtype).removeprefix("torch."),
            memory=memory,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            cache_dtype=cache_dtype,
            block_size=block_size,
            prefix_caching=prefix_caching and not model.config.is_encoder_decoder,
        )
        roles = read_roles(model.config, planned.model)
        engine = Engine(planned, str(model.device), roles.windows)
        return cls(planned, roles, engine, model)

    def cache(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
    ) -> Cache:
        """A cache for one batch, which begins with what the pool has of its prompts.

        Pass it to `model.generate(input_ids, attention_mask=..., past_key_values=cache)` with the same ids. When it is
        closed, or garbage, its conversations are kept for their next turn until the room is needed.

        Args:
            input_ids: [batch, columns], padded on the left; None: a plain cache that finds nothing and leaves nothing.
            attention_mask: [batch, columns], 0 where a prompt is padded.

        Raises:
            UsageError: the mask has a 0 behind a 1, or this pool does not look prefixes up.
        """
        kind = PagedEncoderDecoderCache if self._engine.has_encoder else PagedCache
        if input_ids is None:
            return kind(Session(self._engine), self._roles)
        if not self.planned.blocks.prefix_caching:
            rule = (
                "are given to a pool that does not look prefixes up: it was made without, or has an encoder"
            )
            raise UsageError(option="input_ids", value=None, rule=rule)
        rows, length = PrefixFinder(self._engine).rows(prompts(input_ids, attention_mask))
        return kind(Session(self._engine, rows, length), self._roles)

    def prefill(self, input_ids: torch.Tensor) -> int:
        """Run the model on a prompt that others will begin with, such as a system prompt, so that they find all of it.

        Models without recurrent state leave what they need by themselves; a state is only found where a pass ended.

        Args:
            input_ids: [1, tokens].

        Returns:
            Tokens that later prompts will find, a multiple of the block.
        """
        model, unit = self._model(), self.planned.blocks.alignment
        aligned: int = input_ids.shape[1] // unit * unit
        if model is None or not aligned:
            return 0
        rows, length = PrefixFinder(self._engine).rows(prompts(input_ids[:, :aligned], None), more=1)
        session = Session(self._engine, rows, length)
        cache = PagedCache(session, self._roles)
        try:
            with torch.no_grad():
                model(input_ids=input_ids[:, session.length : aligned], cache=cache, use_cache=True)
        finally:
            session.close(keep=False)
        return aligned

    def statistics(self) -> PoolStatistics:
        """What the pool holds and what it has saved."""
        self._engine.settle()
        return self._engine.statistics()

    def close(self) -> None:
        """Give the memory back; caches of this pool can no longer be used."""
        self._engine.settle()
        self._engine.storage.close()


def _watch(model: Any) -> None:
    """Let caches know what the model is about to run on; once a model, however many pools it has."""
    if tell_cache not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(tell_cache, with_kwargs=True)


def tell_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: tells a paged cache among the arguments which ids and which padding are coming."""
    session = getattr(kwargs.get("cache", kwargs.get("past_key_values")), "_session", None)
    if session is None or session.engine.has_encoder:
        return
    ids = kwargs.get("input_ids", args[0] if args else None)
    given = ids if ids is not None else kwargs.get("inputs_embeds")
    if given is not None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        session.begin(given.shape[0], given.shape[1], ids, paddings(mask, given.shape[0]))
