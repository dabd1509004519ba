"""Small configs of the ways in which models are spelt, and reading them with the installed plugins."""

from kvframe import load_plugins
from kvframe.models import model_specs, read_config, read_layers
from kvframe.readers import ReadOptions

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
SLIDING = {**LLAMA, "model_type": "mistral", "sliding_window": 128}
LATENT = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
MAMBA2 = {
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
BAMBA = {**LLAMA, **MAMBA2, "model_type": "bamba", "attn_layer_indices": [1, 3]}
KIMI = {
    **LATENT,
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
WHISPER = {
    "model_type": "whisper",
    "d_model": 1280,
    "decoder_layers": 3,
    "decoder_attention_heads": 20,
    "num_hidden_layers": 32,  # of the encoder
}


def options(host, **changed):
    known = {"block_size": 16, "cache_dtype": "bfloat16", "model_dtype": "bfloat16", "max_model_len": 4096}
    values = {**known, **changed}
    return ReadOptions(**{**values, "cache_dtype": host.cache_dtypes.get(values["cache_dtype"])})


def specs(config, **changed):
    host = load_plugins()
    return model_specs(read_config(config), host, options(host, **changed))


def kinds(config):
    """One word a layer; the kinds of a layer with several are joined by +."""
    return ["+".join(layer.kinds) for layer in read_layers(read_config(config), load_plugins())]


def at(layer_kinds, kind):
    return [index for index, owned in enumerate(layer_kinds) if owned == kind]
