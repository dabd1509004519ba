"""A new kind of cache in forty lines, with no change in the core: what a plugin's author has to write.

Layers of this kind read the last `keep_tokens` tokens. Their config.json calls them "recent_attention".
"""

import json
import types

import attrs
import numpy as np
import pytest

from kvframe import (
    AttentionSpec,
    EngineConfig,
    FullAttentionSpec,
    KVFrameError,
    LayerReader,
    Lifetime,
    Refusal,
    SpecFamily,
    Traits,
    hookimpl,
    kv_field,
    load_plugins,
)
from kvframe.checks import at_least
from kvframe.errors import SpecError, UnknownLayerKindError
from kvframe.models import inspect_model, model_specs, read_config, read_layers
from kvframe.planning import plan
from tests.model_configs import LLAMA, options

# --- the plugin: a spec, a lifetime, a family, a reader --------------------------------------------------------------


@attrs.frozen(kw_only=True, repr=False)
class RecentSpec(AttentionSpec):
    """A layer that reads the last `keep_tokens` tokens, in whole blocks."""

    keep_tokens: int = kv_field(validator=at_least(1))

    def max_memory_usage_bytes(self, engine):
        held = RecentLifetime(block=self.block_size, keep=self.keep_tokens)
        return held.peak(engine.max_in_flight_tokens, engine.max_model_len) * self.page_size_bytes


@attrs.frozen(kw_only=True)
class RecentLifetime(Lifetime):
    """Blocks die from the front, `keep` tokens after their last token."""

    keep: int

    def dead(self, n, prompt):
        return np.zeros_like(n), np.maximum(0, n - self.keep) // self.block


class RecentPlugin:
    """The hooks; in a distribution, two functions of its module."""

    @hookimpl
    def kvframe_spec_families(self):
        return [
            SpecFamily(
                name="recent",
                spec_type=RecentSpec,
                lifetime=lambda spec: RecentLifetime(block=spec.block_size, keep=spec.keep_tokens),
                traits=Traits(event_kind="recent"),
            )
        ]

    @hookimpl
    def kvframe_layer_readers(self):
        return [LayerReader(kind="recent_attention", read=self.read)]

    def read(self, layer):
        return {"attn": layer.attention(RecentSpec, keep_tokens=layer.config.integer("keep_tokens"))}


# --- what the core makes of it ---------------------------------------------------------------------------------------

CONFIG = {
    **LLAMA,
    "model_type": "newthing",
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "keep_tokens": 256,
    "layer_types": ["recent_attention", "recent_attention", "recent_attention", "full_attention"],
}


@pytest.fixture(scope="module")
def host():
    return load_plugins(extra=[RecentPlugin()])


def model(host, config=CONFIG, **changed):
    return model_specs(read_config(config), host, options(host, **changed))


def test_without_the_plugin_the_word_is_unknown():
    with pytest.raises(UnknownLayerKindError) as caught:
        read_layers(read_config(CONFIG), load_plugins())
    assert (caught.value.layer, caught.value.value) == (0, "recent_attention")


def test_with_it_the_model_is_read(host):
    made = model(host)
    assert made.layers == {"recent_attention": 3, "full_attention": 1}
    assert made.specs["layers.0.attn"] == RecentSpec(
        16, num_kv_heads=8, head_size=128, dtype="bfloat16", max_tp_shards=8, keep_tokens=256
    )
    sizes = inspect_model(made, host)["bytes"]
    assert sizes["bytes_per_token_before_any_window_is_full"] == 4 * 4096  # 2 * 8 * 128 * 2 = 4,096 a layer
    assert sizes["bytes_per_token_growth_after_all_windows_are_full"] == 4096


def test_ranks_and_cache_dtypes_work_as_for_any_attention(host):
    assert model(host, tp=4).specs["layers.0.attn"].num_kv_heads == 2
    packed = model(host, cache_dtype="int8_per_token_head").specs["layers.0.attn"]
    assert packed.page_size_bytes == 33792  # 8 heads * 16 tokens * (128 + 128 + 8) bytes


def test_it_is_planned(host):
    made = plan(
        model(host).specs,
        engine=EngineConfig(max_model_len=4096),
        memory=1 << 30,
        host=host,
        strategy="engine",
        kinds=model(host).kinds,
    ).report
    # One full layer and three recent ones: four groups of one layer, pages of 16 * 4,096 = 65,536 bytes.
    assert made.page_bytes == {"recent_attention": 65536, "full_attention": 65536}
    assert made.num_blocks == (1 << 30) // 65536
    assert made.groups_by_kind == {"recent_attention": 3, "full_attention": 1}
    # 4096 / 16 for full attention; for the others 256 tokens and the one in flight, from inside a block: 17
    assert made.blocks_per_request == {"recent_attention": 17, "full_attention": 256}
    assert made.blocks_per_request_total == 256 + 3 * 17


def test_the_command_line_plans_it(host, tmp_path, capsys, monkeypatch):
    from kvframe.cli import plan as cli_plan
    from tests.command_line import kvframe

    monkeypatch.setattr(cli_plan, "load_plugins", lambda: host)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    answer = kvframe(capsys, "plan", config, "--memory", "1GiB", "--strategy", "engine", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["blocks_per_request_total"] == 307
    assert "model type 'newthing' is unknown" in answer.err


def test_its_layers_merge_by_their_fields(host):
    one = RecentSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16", keep_tokens=256)
    family = host.family(one)
    assert family.merge({"a": one, "b": one}) == one
    refusal = family.merge({"a": one, "b": attrs.evolve(one, keep_tokens=128)})
    assert isinstance(refusal, Refusal)
    assert (refusal.field, refusal.layers) == ("keep_tokens", {"128": ("b",), "256": ("a",)})
    full = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    assert isinstance(family.merge({"a": one, "b": full}), Refusal)


def test_wrong_values_are_refused_with_the_core_s_errors(host):
    with pytest.raises(SpecError, match=r"RecentSpec\.keep_tokens = 0: must be a whole number of at least 1"):
        RecentSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16", keep_tokens=0)
    lacking = {name: value for name, value in CONFIG.items() if name != "keep_tokens"}
    with pytest.raises(KVFrameError, match="field 'keep_tokens' is missing"):
        model(host, lacking)


def test_a_module_is_as_good_as_an_object():
    families, readers = RecentPlugin().kvframe_spec_families(), RecentPlugin().kvframe_layer_readers()
    module = types.ModuleType("kvframe_recent")
    module.kvframe_spec_families = hookimpl(lambda: families)
    module.kvframe_layer_readers = hookimpl(lambda: readers)
    assert model(load_plugins(extra=[module])).layers == {"recent_attention": 3, "full_attention": 1}
