"""How plugins read models: a ModelReader says what kinds each layer is of, a LayerReader turns a kind into specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from kvframe.checks import at_least
from kvframe.dtypes import CacheDType, dtype_name, element_size
from kvframe.errors import MissingFieldError, ModelConfigError, NotDivisibleError, SpecError, UsageError
from kvframe.packing import packed
from kvframe.spec import AttentionSpec, FullAttentionSpec, KVCacheSpec

A = TypeVar("A", bound=AttentionSpec)


@attrs.frozen
class ModelConfig:
    """The decoder's part of a config.json, with reading that never guesses.

    Args:
        values: the fields, those of `text_config` where the file nests them.
        file: what error messages call the file.
        prefix: what they put before a field's name, for an object inside the file.
    """

    values: Mapping[str, Any]
    file: str = "config.json"
    prefix: str = ""

    @property
    def model_type(self) -> str:
        """The model type, "" where the file has none."""
        return str(self.values.get("model_type") or "")

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is set (not null), else the default."""
        return next((v for name in names if (v := self.values.get(name)) is not None), default)

    def need(self, *names: str) -> Any:
        """The first of these fields that is set.

        Raises:
            MissingFieldError: none is.
        """
        value = self.get(*names)
        if value is None:
            rule = f"one of {', '.join(names)} is needed" if len(names) > 1 else ""
            raise MissingFieldError(file=self.file, field=self.prefix + names[0], rule=rule)
        return value

    def integer(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least `low`.

        Raises:
            MissingFieldError: absent, and there is no default.
            ModelConfigError: not a whole number, or too small.
        """
        value = self.get(*names, default=default)
        if value is None:
            value = self.need(*names)
        name = next((name for name in names if self.values.get(name) is not None), names[0])
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.invalid(name, value, f"must be a whole number of at least {low}")
        return value

    def flag(self, name: str) -> bool | None:
        """A true or false field, None where absent.

        Raises:
            ModelConfigError: neither true nor false.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.invalid(name, value, "must be true or false")
        return value

    def dtype(self, *names: str, default: str | None = None) -> str | None:
        """An element dtype.

        Raises:
            ModelConfigError: no dtype has that name.
        """
        value = self.get(*names, default=default)
        if value is None:
            return None
        try:
            element_size(value)
        except SpecError as error:
            field = next((name for name in names if self.get(name) is not None), names[0])
            raise self.invalid(field, value, error.rule) from error
        return dtype_name(value)

    def section(self, name: str) -> ModelConfig:
        """The fields of an object inside the file.

        Raises:
            MissingFieldError: absent.
            ModelConfigError: no object.
        """
        value = self.need(name)
        if not isinstance(value, Mapping):
            raise self.invalid(name, value, "must be an object")
        return ModelConfig(values=value, file=self.file, prefix=f"{self.prefix}{name}.")

    def per_layer(self, name: str) -> Sequence[Any]:
        """A list (or string) with one item (or letter) a layer.

        A list longer by exactly `num_nextn_predict_layers` ends with draft layers; they are left out.

        Raises:
            MissingFieldError: absent.
            ModelConfigError: not a list of that length.
        """
        value, count = self.need(name), self.num_layers
        if not isinstance(value, (list, tuple, str)):
            raise self.invalid(name, value, f"must be a list of {count} items, one a layer")
        drafts = self.integer("num_nextn_predict_layers", default=0, low=0)
        if len(value) not in (count, count + drafts):
            also = f", or {count + drafts} with draft layers" if drafts else ""
            raise self.invalid(
                name, len(value), f"that many items, and there must be {count}, one a layer{also}"
            )
        return value[:count]

    def invalid(self, field: str, value: Any, rule: str) -> ModelConfigError:
        """The error for a field whose value cannot be right."""
        return ModelConfigError(file=self.file, field=self.prefix + field, value=value, rule=rule)

    @property
    def num_layers(self) -> int:
        """Decoder layers, at least 1."""
        return self.integer("num_hidden_layers", "n_layer", "num_layers")


@attrs.frozen(kw_only=True)
class Layer:
    """One layer of a model: the kinds it owns a cache of, and what this layer holds differently from the config.

    Args:
        index: position in the model, from 0.
        kinds: layer kinds, such as ("full_attention",); ("no_cache",) or ("shared_no_cache",) own none.
        facts: config fields with this layer's values, where they differ from the model's.
        shares_with: index of the earlier layer whose cache this one uses.
    """

    index: int = attrs.field(validator=at_least(0))
    kinds: tuple[str, ...]
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    shares_with: int | None = None


@attrs.frozen(kw_only=True)
class ModelReader:
    """Reads model types whose config spells layers in a way of its own.

    Args:
        model_types: the `model_type` words it reads.
        read: the config to one Layer a layer, in order; `kvframe.spelling` has the common spellings to build on.
    """

    model_types: tuple[str, ...]
    read: Callable[[ModelConfig], Sequence[Layer]]


@attrs.frozen(kw_only=True)
class ReadOptions:
    """What the operator chose, as a LayerReader needs it.

    Args:
        block_size: tokens.
        cache_dtype: how token caches are stored.
        model_dtype: element dtype of the model's weights.
        state_dtype: element dtype of recurrent states; None: the config's own, else the cache's.
        tp: tensor parallel ranks that attention and states are split over.
        caching: prefix caching is on, so states are kept at block borders.
        speculative_tokens: draft tokens that states must be able to roll back.
    """

    block_size: int = attrs.field(validator=at_least(1))
    cache_dtype: CacheDType
    model_dtype: str
    max_model_len: int = attrs.field(validator=at_least(1))
    state_dtype: str | None = None
    tp: int = attrs.field(default=1, validator=at_least(1))
    caching: bool = True
    speculative_tokens: int = attrs.field(default=0, validator=at_least(0))


@attrs.frozen(kw_only=True)
class LayerContext:
    """What a LayerReader sees.

    Args:
        config: the model's fields, the layer's own facts laid over them.
        layer: which layer it is.
        options: what the operator chose.
        family_name: a spec to the name of its family.
    """

    config: ModelConfig
    layer: Layer
    options: ReadOptions
    family_name: Callable[[object], str]

    def split_heads(self, total: int, field: str = "num_key_value_heads") -> int:
        """KV heads on one rank: divided, or one replicated head where there are fewer heads than ranks.

        Raises:
            NotDivisibleError: neither number divides the other; names both.
        """
        tp = self.options.tp
        if total % tp and tp % total:
            raise NotDivisibleError(
                file=self.config.file,
                field=field,
                value=total,
                divisor=tp,
                rule="heads are divided over ranks, or each is copied to as many: one number must divide the other",
            )
        return max(1, total // tp)

    def head_dim(self) -> int:
        """Elements of a K vector: `head_dim`, else hidden_size / num_attention_heads where that is whole.

        Raises:
            MissingFieldError: absent and not derivable.
        """
        config = self.config
        if config.get("head_dim") is not None:
            return config.integer("head_dim")
        if config.get("hidden_size") is None:
            raise MissingFieldError(file=config.file, field="head_dim", rule="and hidden_size is missing too")
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        if hidden % heads:
            raise MissingFieldError(
                file=config.file,
                field="head_dim",
                rule=f"hidden_size {hidden} / num_attention_heads {heads} is no whole number, so it cannot be derived",
            )
        return hidden // heads

    def kv_heads_total(self) -> int:
        """KV heads of the layer over all ranks: one a query head where the config names no other number."""
        return self.config.integer("num_key_value_heads", "num_attention_heads")

    def attention(self, spec_type: type[A], **fields: Any) -> A:
        """A spec for this layer's keys and values: heads of one rank, cell packed as the cache dtype says.

        Args:
            spec_type: the attention spec to build.
            fields: its other fields. Those of heads (`num_kv_heads` with `max_tp_shards`, `head_size`, `head_size_v`)
                and `dtype` default to what the config and the options say.

        Raises:
            ModelConfigError: a field is missing or wrong, or heads do not divide.
            UsageError: the cache dtype does not serve the spec's family.
        """
        config, options = self.config, self.options
        if "num_kv_heads" not in fields:
            total = self.kv_heads_total()
            fields |= {"num_kv_heads": self.split_heads(total), "max_tp_shards": total}
        if "head_size" not in fields:
            fields["head_size"] = self.head_dim()
            fields["head_size_v"] = config.integer("v_head_dim", default=fields["head_size"])
        fields.setdefault("dtype", options.cache_dtype.element_dtype(options.model_dtype))
        spec = spec_type(options.block_size, **fields)
        family = self.family_name(spec)
        if not options.cache_dtype.serves(family):
            serves = ", ".join(sorted(options.cache_dtype.families or ()))
            rule = f"cannot store the family {family!r} of layer {self.layer.index}, only {serves}"
            raise UsageError(option="--cache-dtype", value=options.cache_dtype.name, rule=rule)
        return packed(spec, options.cache_dtype)


@attrs.frozen(kw_only=True)
class LayerReader:
    """Turns a layer of one kind into specs.

    Args:
        kind: the layer kind it owns, such as "full_attention".
        read: the layer to {suffix: spec}; the layer's cache is then called "layers.<index>.<suffix>".
    """

    kind: str
    read: Callable[[LayerContext], Mapping[str, KVCacheSpec]]


def full_attention_reader() -> LayerReader:
    """The reader of the one layer kind that the core knows itself."""
    return LayerReader(
        kind="full_attention",
        read=lambda layer: {"attn": layer.attention(FullAttentionSpec)},
    )
