"""The common spellings of layer kinds in config files: pure functions from a ModelConfig to its layers.

Every model reader builds on `common_layers`: a model type whose files spell layers in a way of their own says only what
its words mean, what its pattern is where the file has none, and which fields some kinds of its layers read instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from kvframe.readers import Layer, ModelConfig

T = TypeVar("T")
Kinds = tuple[str, ...]
Pattern = Callable[[int], Kinds]

FULL: Kinds = ("full_attention",)
SLIDING: Kinds = ("sliding_attention",)
CHUNKED: Kinds = ("chunked_attention",)
NO_CACHE: Kinds = ("no_cache",)
SHARED: Kinds = ("shared_no_cache",)
OWN_NOTHING = frozenset({*NO_CACHE, *SHARED})

# Words for a kind that do not name it; every other word is taken for the kind's own name.
_WORDS: Mapping[str, Kinds] = {"attention": FULL}
_LISTS = ("layer_types", "layers_block_type")


def common_layers(
    config: ModelConfig,
    *,
    words: Mapping[str, Kinds] | None = None,
    pattern: Callable[[ModelConfig], Pattern] | None = None,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Layer, ...]:
    """The layers of a model, from the first of these that its file has or its type says.

    1. `layer_types`, one word a layer.
    2. `sliding_window_pattern` p: layer i is full where (i + 1) % p == 0, else sliding.
    3. The model type's own pattern.
    4. What single fields say: latent attention, a window, chunks, else full attention; see `plain_pattern`.

    Then full attention becomes latent where `kv_lora_rank` is set, a window that `use_sliding_window` switches off is
    none, and the last `num_kv_shared_layers` layers own no cache. An unknown word is kept as the layer's kind: whoever
    knows the kinds refuses it.

    Args:
        words: what `layer_types` words of this model type mean, where they do not name their kind.
        pattern: the model type's own pattern, asked for where the file has no list.
        facts: layer kind to the config fields that layers of that kind hold differently.

    Raises:
        ModelConfigError: a list of the wrong length, or a field that is no number.
    """
    if config.get(list_field(config)) is not None:
        kinds = _words(config, {**_WORDS, **(words or {})})
    elif config.get("sliding_window_pattern") is not None:
        kinds = every_nth(config.integer("sliding_window_pattern"))
    else:
        kinds = (pattern or plain_pattern)(config)
    replaced = _replaced_kinds(config)
    layers = []
    for index in range(config.num_layers):
        owned = tuple(new for kind in kinds(index) for new in replaced.get(kind, (kind,)))
        own_facts = {field: value for kind in owned for field, value in (facts or {}).get(kind, {}).items()}
        layers.append(Layer(index=index, kinds=owned, facts=own_facts))
    return _with_shared(config, layers)


def _words(config: ModelConfig, words: Mapping[str, Kinds]) -> Pattern:
    field = list_field(config)
    items = config.per_layer(field)
    for index, word in enumerate(items):
        if not isinstance(word, str):
            raise config.invalid(f"{field}[{index}]", word, "must be a word")
    return lambda index: words.get(items[index], (items[index],))


def list_field(config: ModelConfig) -> str:
    """The field that holds one word a layer, whether it is set or not."""
    return next((name for name in _LISTS if config.get(name) is not None), _LISTS[0])


def _replaced_kinds(config: ModelConfig) -> Mapping[str, Kinds]:
    replaced: dict[str, Kinds] = {}
    if config.get("kv_lora_rank") is not None:
        replaced["full_attention"] = (
            ("mla", "indexer") if config.get("index_head_dim") is not None else ("mla",)
        )
    if not _window_is_on(config):
        replaced["sliding_attention"] = replaced.get("full_attention", FULL)
    return replaced


def _window_is_on(config: ModelConfig) -> bool:
    # Types that bring the flag with a window number switched off by default; for all others the number is the switch.
    flag = config.flag("use_sliding_window")
    return not config.model_type.startswith("qwen") if flag is None else flag


def plain_pattern(config: ModelConfig) -> Pattern:
    """The kinds of layers that no list and no pattern names, from single fields.

    A `sliding_window` without more makes every layer slide, with `max_window_layers` m only the layers i >= m; a window
    number that is null or absent is none. `attention_chunk_size` makes every layer chunked.

    Raises:
        ModelConfigError: a window and chunks, and nothing says which layer has which.
    """
    if config.get("kv_lora_rank") is not None:
        return lambda index: FULL
    window = config.get("sliding_window") is not None and _window_is_on(config)
    if config.get("attention_chunk_size") is not None:
        if window:
            rule = "sliding_window is set too, and no field says which layers have which"
            raise config.invalid("attention_chunk_size", config.get("attention_chunk_size"), rule)
        return lambda index: CHUNKED
    if not window:
        return lambda index: FULL
    first = config.integer("max_window_layers", default=0, low=0)
    return lambda index: SLIDING if index >= first else FULL


def every_nth(n: int, nth: Kinds = FULL, others: Kinds = SLIDING) -> Pattern:
    """The pattern in which layers n - 1, 2n - 1, … are of one kind and the others of another."""
    return lambda index: nth if (index + 1) % n == 0 else others


def listed(config: ModelConfig, field: str, meaning: Mapping[Any, T]) -> Callable[[int], T]:
    """What a field with one item (or letter) a layer says of layer i.

    Args:
        meaning: item to what it stands for.

    Raises:
        MissingFieldError: absent.
        ModelConfigError: a list of the wrong length, or an item that means nothing; names it.
    """
    items = config.per_layer(field)
    for index, item in enumerate(items):
        if not isinstance(item, (str, int)) or item not in meaning:
            raise config.invalid(f"{field}[{index}]", item, f"must be one of {', '.join(map(repr, meaning))}")
    return lambda index: meaning[items[index]]


def indices(config: ModelConfig, field: str, values: Any, first: int = 0) -> frozenset[int]:
    """Layer numbers as positions from 0.

    Args:
        field: what an error calls the list.
        values: the list.
        first: the number that the file gives layer 0.

    Raises:
        ModelConfigError: no list, or a number that is no layer's.
    """
    count = config.num_layers
    if not isinstance(values, (list, tuple)):
        raise config.invalid(field, values, "must be a list of layer numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not first <= value < first + count:
            raise config.invalid(field, value, f"must be a layer number from {first} to {first + count - 1}")
    return frozenset(value - first for value in values)


def _with_shared(config: ModelConfig, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The last `num_kv_shared_layers` layers use the cache of the last layer of their kinds that owns one."""
    shared = config.integer("num_kv_shared_layers", default=0, low=0)
    owners = layers[: max(0, len(layers) - shared)]
    result = list(owners)
    for layer in layers[len(owners) :]:
        owner = next((other for other in reversed(owners) if other.kinds == layer.kinds), None)
        if owner is None:
            rule = f"layer {layer.index} ({', '.join(layer.kinds)}) has no earlier layer of its kind to share with"
            raise config.invalid("num_kv_shared_layers", shared, rule)
        result.append(attrs.evolve(layer, kinds=SHARED, shares_with=owner.index))
    return tuple(result)
