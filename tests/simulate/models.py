"""Models that are simulated: small ones to count by hand, and the hybrids of the design's figures."""

import attrs

from kvframe import EngineConfig, FullAttentionSpec, load_plugins
from kvframe.models import model_dtype, model_specs, read_config
from kvframe.readers import ReadOptions
from kvframe.simulate import Case, Lengths, Pace, RandomStream, RecordedStream
from tests.planning.models import engine, specs_of

HOST = load_plugins()
GIB = 1 << 30

# Public config of Nemotron-H-8B-Base-8K: 24 Mamba-2 layers and 4 of attention.
NEMOTRON_H_8B = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
HYBRIDS = ("gemma-3-27b", "qwen3-next-80b", "20 full + 30 sliding", "nemotron-h-8b")


def hybrid(name, length):
    """A hybrid's specs in bfloat16, states in the dtype of its config, blocks of 16 tokens."""
    if name != "nemotron-h-8b":
        return specs_of(name, length)
    config = read_config(NEMOTRON_H_8B)
    options = ReadOptions(
        block_size=16,
        cache_dtype=HOST.cache_dtypes.get("bfloat16"),
        model_dtype=model_dtype(config),
        max_model_len=length,
        caching=True,
    )
    return model_specs(config, HOST, options).specs


def hybrid_case(name, stream, *, memory=40 * GIB, strategy="optimal", length=None, **more):
    """A case of a hybrid."""
    longest = length or (8192 if name == "nemotron-h-8b" else 131_072)
    return Case(
        specs=hybrid(name, longest),
        engine=engine(name, longest),
        memory=memory,
        stream=stream,
        strategy=strategy,
        **more,
    )


def chats(requests, seed=0):
    """Chats of 16 to 1,024 tokens: half of it, at most, is the prompt's, and half is generated."""
    part = Lengths(low=8, high=512)
    return RandomStream(requests=requests, prompt=part, output=part, seed=seed)


# One layer of full attention: blocks of 4 tokens, 4 * 1 * (8 + 8) * 2 = 128 bytes.
TINY = {"layer": FullAttentionSpec(4, num_kv_heads=1, head_size=8, dtype="bfloat16")}


def tiny(*arrivals, blocks, strategy="engine", pace=None, **more):
    """A model of one layer, `blocks` usable blocks of 4 tokens beside the null block."""
    values = {
        "specs": TINY,
        "engine": EngineConfig(max_model_len=64),
        "memory": 128 * (blocks + 1),
        "stream": RecordedStream(requests=arrivals),
        "strategy": strategy,
        "pace": pace or Pace(quantum=1, token_seconds=1.0, prefill_rate=1e9, ramp=0.0),
        "max_requests": 16,
    }
    return Case(**{**values, **more})


def changed(case, **values):
    """The same case with other values."""
    return attrs.evolve(case, **values)
