"""Shapes and element dtypes of the states that one layer keeps on one rank, by kind of layer.

Each function returns (shapes, dtypes), the convolution state before the recurrent one where a kind has both. A rank
holds its heads' or channels' share; every division over tensor-parallel ranks is exact, or refused.
"""

from __future__ import annotations

import attrs

from kvframe.checks import at_least
from kvframe.dtypes import CacheDType
from kvframe.errors import NotDivisibleError

States = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]


@attrs.frozen(kw_only=True)
class StateStorage:
    """How a model stores and splits its states, whatever their kind.

    Args:
        conv_dtype: element dtype of convolution states.
        recurrent_dtype: element dtype of recurrent states.
        tp: tensor-parallel ranks that a layer's states are split over.
        speculative_tokens: draft tokens that may be rolled back; a convolution state gets as many more columns.
        file: what error messages call the model's config.
    """

    conv_dtype: str
    recurrent_dtype: str
    tp: int = attrs.field(default=1, validator=at_least(1))
    speculative_tokens: int = attrs.field(default=0, validator=at_least(0))
    file: str = "config.json"

    @classmethod
    def resolve(
        cls,
        cache_dtype: CacheDType,
        model_dtype: str,
        state_dtype: str | None = None,
        *,
        tp: int = 1,
        speculative_tokens: int = 0,
        file: str = "config.json",
    ) -> StateStorage:
        """The storage that the options ask for.

        Args:
            cache_dtype: of the token caches; a quantised one never applies to states, the model's dtype does instead.
            model_dtype: element dtype of the model's weights.
            state_dtype: element dtype of recurrent states; None: as convolution states.
        """
        conv = model_dtype if cache_dtype.is_quantized else cache_dtype.element_dtype(model_dtype)
        return cls(
            conv_dtype=conv,
            recurrent_dtype=state_dtype or conv,
            tp=tp,
            speculative_tokens=speculative_tokens,
            file=file,
        )

    def split(self, field: str, total: int) -> int:
        """`total` over the ranks.

        Raises:
            NotDivisibleError: it leaves a rest; names both numbers.
        """
        if total % self.tp:
            rule = "the tensor parallel size must divide it"
            raise NotDivisibleError(file=self.file, field=field, value=total, divisor=self.tp, rule=rule)
        return total // self.tp

    def split_groups(self, total: int) -> int:
        """Groups on one rank: divided where that is exact, else one for each rank."""
        return total // self.tp if total % self.tp == 0 else 1

    def conv(self, kernel: int, width: int) -> tuple[int, int]:
        """Shape of a convolution state: the inputs that the kernel still needs, and those of draft tokens."""
        return (kernel - 1 + self.speculative_tokens, width)


def mamba1(storage: StateStorage, *, inner: int, state: int, kernel: int) -> States:
    """Mamba 1: inner channels, `state` numbers a channel. Drafts are not rolled back, so no column is added.

    Raises:
        NotDivisibleError: the ranks do not divide `inner`.
    """
    width = storage.split("inner", inner)
    return ((kernel - 1, width), (width, state)), (storage.conv_dtype, storage.recurrent_dtype)


def mamba2(
    storage: StateStorage, *, heads: int, head_dim: int, groups: int, state: int, kernel: int
) -> States:
    """Mamba 2: heads that share B and C in groups; the convolution runs over the heads' inputs, B and C.

    Raises:
        NotDivisibleError: the ranks do not divide `heads`.
    """
    local_heads = storage.split("heads", heads)
    width = local_heads * head_dim + 2 * storage.split_groups(groups) * state
    shapes = (storage.conv(kernel, width), (local_heads, head_dim, state))
    return shapes, (storage.conv_dtype, storage.recurrent_dtype)


def gated_delta_net(
    storage: StateStorage, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int
) -> States:
    """Gated delta net: the convolution runs over queries, keys (`key_heads` each) and values.

    Raises:
        NotDivisibleError: the ranks do not divide `value_heads`, or the channels of the convolution.
    """
    local_values = storage.split("value_heads", value_heads)
    width = storage.split("channels", 2 * key_heads * key_dim + value_heads * value_dim)
    shapes = (storage.conv(kernel, width), (local_values, value_dim, key_dim))
    return shapes, (storage.conv_dtype, storage.recurrent_dtype)


def kimi_delta(storage: StateStorage, *, heads: int, head_dim: int, kernel: int) -> States:
    """Kimi delta attention: queries, keys and values of one width; the recurrent state is float32 whatever is asked.

    Raises:
        NotDivisibleError: the ranks do not divide `heads`.
    """
    local_heads = storage.split("heads", heads)
    shapes = (storage.conv(kernel, 3 * local_heads * head_dim), (local_heads, head_dim, head_dim))
    return shapes, (storage.conv_dtype, "float32")


def short_conv(storage: StateStorage, *, inner: int, kernel: int) -> States:
    """A short convolution over `inner` channels, without a recurrent state.

    Raises:
        NotDivisibleError: the ranks do not divide `inner`.
    """
    return (storage.conv(kernel, storage.split("inner", inner)),), (storage.conv_dtype,)


def lightning(storage: StateStorage, *, heads: int, head_dim: int) -> States:
    """Lightning attention: one matrix a head, in the dtype of the cache, without a convolution.

    Raises:
        NotDivisibleError: the ranks do not divide `heads`.
    """
    return ((storage.split("heads", heads), head_dim, head_dim),), (storage.conv_dtype,)
