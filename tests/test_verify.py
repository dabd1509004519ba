"""No two blocks that live at once share a byte: contract 2.21, and 8, Q32."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe import EngineConfig, FullAttentionSpec
from kvframe.address import addresses
from kvframe.config import KVCacheConfig, KVCacheTensor, Pool
from kvframe.errors import InsufficientMemoryError, KVFrameError, LayoutError, PlanError
from kvframe.planning.plan import plan
from kvframe.verify import verify
from kvframe_hisparse import HiSparseHotSpec
from kvframe_mamba import MambaSpec
from kvframe_sliding_window import SlidingWindowSpec
from tests.plans import HOST, group_of, plan_of

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def full(heads=1, block_size=2, **fields):
    return FullAttentionSpec(
        block_size, **{"num_kv_heads": heads, "head_size": 1, "dtype": "uint8", **fields}
    )


def shared_bytes(config: KVCacheConfig) -> list[tuple[int, set]]:
    """Byte by byte, who may own it: bytes of two slabs, or of two pages of one group."""
    owners: dict[tuple[str, int], set] = {}
    for tensor in config.tensors:
        group = config.group_of(tensor.layers[0])
        pool = config.pools[tensor.pool]
        found = addresses(
            group.layer_specs[tensor.layers[0]],
            config.num_blocks_of(tensor),
            HOST.layouts.get(pool.layout),
            tensor,
            buffer_bytes=pool.size_bytes,
        )
        group_id = [g is group for g in config.groups].index(True)
        blocks, heads, states, width = found.shape
        for layer in range(found.num_layers):
            for block in range(blocks):
                for head in range(heads):
                    for state in range(states):
                        steps = (layer, block, head, state)
                        cell = found.offset + sum(n * s for n, s in zip(steps, found.strides, strict=False))
                        for byte in range(cell, cell + width):
                            owner = (group_id, tensor.layers[layer], block, block // group.blocks_per_slab)
                            owners.setdefault((tensor.pool, byte), set()).add(owner)
    return [
        (byte, who)
        for (_, byte), who in owners.items()
        if len({slab for *_, slab in who}) > 1 or len({owner[0] for owner in who}) < len(who)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_planner_makes_is_sound(layout):
    window = SlidingWindowSpec(4, num_kv_heads=2, head_size=4, dtype="bfloat16", sliding_window=8)
    specs = {f"full {i}": full(2, 4, head_size=4, dtype="bfloat16") for i in range(2)}
    specs |= {f"window {i}": window for i in range(3)}
    for strategy in ("engine", "optimal"):
        made = plan(
            specs, engine=EngineConfig(max_model_len=16), memory=4_096, layout=layout, strategy=strategy
        )
        verify(made.config, HOST.layouts)
        assert shared_bytes(made.config) == []


def test_groups_overlay_each_other_slab_by_slab():
    config = plan_of(
        group_of({"a": full(4), "b": full(2)}),
        group_of({"c": full(1)}, blocks_per_slab=3),
        group_of({"raw": HiSparseHotSpec(4, page_size=7, blocks_per_request=2)}),
        group_of({"state": MambaSpec(4, shapes=((3,),), dtypes=("uint8",))}, blocks_per_slab=2),
        slabs=3,
    )
    verify(config, HOST.layouts)
    assert shared_bytes(config) == []


def test_pages_of_one_group_must_not_overlap():
    config = plan_of(group_of({"a": full(4), "b": full(2)}))
    moved = attrs.evolve(config.tensors[1], offset=config.tensors[1].offset - 1)
    broken = attrs.evolve(config, tensors=(config.tensors[0], moved))
    assert shared_bytes(broken)
    with pytest.raises(PlanError, match="pages of group 0 overlap") as caught:
        verify(broken, HOST.layouts)
    assert set(caught.value.layers) == {"a", "b"}


def test_a_block_must_stay_between_two_steps():
    config = plan_of(group_of({"a": full(4)}), slabs=2)  # a page of 4 * 2 * 2 = 16 bytes
    # block 0 from byte 8 to 24: what another group's first block, 20 bytes wide, would not be in step with
    moved = attrs.evolve(config.tensors[0], offset=8, block_stride=20)
    with pytest.raises(PlanError, match="between two steps") as caught:
        verify(attrs.evolve(config, tensors=(moved,)), HOST.layouts)
    assert caught.value.layers == ("a",)
    assert caught.value.values["block stride"] == 20


def test_cells_inside_one_placement_must_not_overlap():
    config = plan_of(group_of({"a": full(4), "b": full(4)}))
    page = 16  # 4 heads * 2 states * 2 bytes
    together = attrs.evolve(config.tensors[0], layers=("a", "b"), layer_stride=page - 1)
    with pytest.raises(LayoutError, match="overlaps"):
        verify(attrs.evolve(config, tensors=(together,)), HOST.layouts)


def test_equal_pages_of_other_heads_cannot_overlay_where_heads_lie_outside_blocks():
    """Contract 4.1, rule 3: in LHBNC block b of 2 heads and block b of 4 heads are not the same bytes."""
    specs = {
        "a": full(2, 4),
        "b": full(4, 2, sliding_window=2),
    }  # pages of 16 bytes, as 2 x 4 and as 4 x 2 states
    pool = Pool(budget_bytes=48, slab_bytes=16, num_slabs=3, layout="LHBNC")
    groups = tuple(group_of({layer: spec}) for layer, spec in specs.items())
    tensors = tuple(
        KVCacheTensor(size=48, layers=(layer,), layer_stride=48, block_stride=stride)
        for layer, stride in (("a", 8), ("b", 4))
    )
    config = KVCacheConfig(pools={"device": pool}, groups=groups, tensors=tensors, max_model_len=8)
    assert shared_bytes(config)
    with pytest.raises(PlanError, match="blocks of different slabs") as caught:
        verify(config, HOST.layouts)
    assert caught.value.layers == ("a", "b")
    whole = attrs.evolve(pool, layout="LBHNC")
    verify(
        attrs.evolve(
            config,
            pools={"device": whole},
            tensors=tuple(attrs.evolve(tensor, block_stride=16) for tensor in tensors),
        ),
        HOST.layouts,
    )


def test_an_unknown_layout_is_named():
    with pytest.raises(LayoutError, match="no layout has this name"):
        verify(plan_of(group_of({"a": full()}), layout="LBNHX"), HOST.layouts)


def test_a_pool_without_slabs_has_nothing_to_look_at():
    verify(plan_of(group_of({"a": full()}), slabs=0), HOST.layouts)


@st.composite
def configs(draw):
    """Small plans of one or two groups, most of them near what a planner would make."""
    layout = draw(st.sampled_from(LAYOUTS))
    slabs = draw(st.integers(1, 3))
    groups, tensors = [], []
    nudge = st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1, 2, 4])
    slab = 2 * draw(st.sampled_from([4, 8, 12]))
    for group_id in range(draw(st.integers(1, 2))):
        per_slab = draw(st.sampled_from([1, 1, 2]))
        spec = full(draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])))
        names = [f"{group_id}.{layer}" for layer in range(draw(st.integers(1, 3)))]
        page, blocks = spec.page_size_bytes, slabs * per_slab
        groups.append(group_of(dict.fromkeys(names, spec), blocks_per_slab=per_slab))
        outermost = layout[0] == "B"
        runs = [names] if draw(st.booleans()) else [[name] for name in names]
        offset = 0
        for run in runs:
            if outermost:
                layer, block, span = page, slab // per_slab, page
                layer = page // spec.num_kv_heads if layout == "BHLNC" else page
            else:
                block = page // spec.num_kv_heads if layout == "LHBNC" else page
                layer = span = page * blocks
            tensors.append(
                KVCacheTensor(
                    size=slab * slabs,
                    layers=tuple(run),
                    layer_stride=max(1, layer + draw(nudge)),
                    block_stride=max(1, block + draw(nudge)),
                    offset=max(0, offset + draw(nudge)),
                )
            )
            offset += span * len(run)
    pool = Pool(budget_bytes=slab * slabs, slab_bytes=slab, num_slabs=slabs, layout=layout)
    return pool, tuple(groups), tuple(tensors)


@settings(max_examples=200, deadline=None)
@given(configs())
def test_what_is_accepted_shares_no_byte(parts):
    pool, groups, tensors = parts
    try:
        config = KVCacheConfig(pools={"device": pool}, groups=groups, tensors=tensors, max_model_len=8)
        verify(config, HOST.layouts)
    except KVFrameError:
        return
    assert shared_bytes(config) == []


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    heads=st.integers(1, 3),
    layers=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    strategy=st.sampled_from(["engine", "optimal"]),
    padding=st.sampled_from([None, 1, 5]),
)
def test_what_the_planner_makes_is_accepted(layout, heads, layers, strategy, padding):
    specs = {}
    for kind, count in enumerate(layers):
        bare = full(heads, 2 * (kind + 1), non_causal=False)
        spec = attrs.evolve(bare, page_size_padded=padding and bare.page_size_bytes + padding)
        if kind:
            spec = SlidingWindowSpec(
                bare.block_size,
                num_kv_heads=heads,
                head_size=1,
                dtype="uint8",
                sliding_window=kind,
                page_size_padded=spec.page_size_padded,
            )
        specs |= {f"{kind}.{layer}": spec for layer in range(count)}
    try:
        made = plan(
            specs, engine=EngineConfig(max_model_len=8), memory=4_096, layout=layout, strategy=strategy
        )
    except (InsufficientMemoryError, LayoutError, PlanError):
        return
    verify(made.config, HOST.layouts)
