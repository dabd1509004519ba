"""Tiny random models of many architectures, and a driver that compares caches step by step."""

import copy
from types import SimpleNamespace

import pytest

try:
    import torch
    import transformers
except ModuleNotFoundError:  # the tests say so and are skipped
    torch = transformers = None
else:
    torch.set_num_threads(1)  # tiny models: more threads only wait for each other

VOCABULARY, WINDOW, BLOCK = 96, 16, 4

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **MOE,
}
LAST_IS_FULL = ["sliding_attention", "sliding_attention", "full_attention"]
# architecture: (model class, config class, what the config says beside SMALL, fields of SMALL that it has not)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}, ()),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}, ()),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}, ()),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": WINDOW}, ()),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": LAST_IS_FULL},
        (),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        (),
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 1, 0],
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
        },
        (),
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT, ("head_dim",)),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT, ("head_dim",)),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "expand": 2, "n_groups": 2, "chunk_size": 8},
        ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 4,
        },
        ("head_dim",),
    ),
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
        },
        ("head_dim",),
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            **MOE,
        },
        (),
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": LAST_IS_FULL},
        (),
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": LAST_IS_FULL},
        (),
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2},
        (),
    ),
}
ENCODER_DECODERS = {
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "n_positions": 256,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 30,
            "max_target_positions": 128,
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
}


def make(name, dtype="float32", attention="eager", **changes):
    """A model with random weights, the same for the same arguments."""
    if name in ENCODER_DECODERS:
        model_class, config_class, fields = ENCODER_DECODERS[name]
    else:
        model_class, config_class, own, absent = ARCHITECTURES[name]
        fields = {key: value for key, value in {**SMALL, **own}.items() if key not in absent or key in own}
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**copy.deepcopy({**fields, **changes}))
    config._attn_implementation = attention
    model = getattr(transformers, model_class)(config).eval().to(getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    # random weights of the default scale give nearly equal logits: make tokens differ
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def poison(cache):
    """Fill all bytes that no sequence holds with NaN (0xff in every byte), but for the null block."""
    session = cache._session
    session.check_in()
    engine = session.engine
    tables = engine.manager.tables
    keyed = engine.manager.cache
    saved = []
    for group, layers in enumerate(engine.storage.groups):
        table, lengths = tables.tables[group], tables.length[group]
        live = {0} | {int(b) for row, n in zip(table, lengths, strict=True) for b in row[:n]}
        if keyed is not None:
            total = layers[0].cells.shape[0]
            live |= {block for block in range(1, total) if block in keyed.index_of[group]}
        index = torch.tensor(sorted(live))
        saved += [(layer.cells, index, layer.cells[index].clone()) for layer in layers]
    for buffer in engine.storage.buffers.values():
        buffer.tensor.fill_(-1)
    for cells, index, values in saved:
        cells[index] = values


def steps(model, ids, cache, chunks, mask=None, *, poisoned=False, **inputs):
    """The logits of each of several forward passes over consecutive columns."""
    logits, at = [], 0
    for chunk in chunks:
        given = dict(inputs)
        part = ids[:, at : at + chunk]
        if mask is not None:
            seen = mask[:, : at + chunk]
            given["attention_mask"] = seen
            if not hasattr(model, "backbone"):  # a model of states only knows no positions
                given["position_ids"] = (seen.cumsum(-1) - 1).clamp(min=0)[:, at:]
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                out = model(decoder_input_ids=part, cache=cache, use_cache=True, **given)
            else:
                out = model(input_ids=part, cache=cache, use_cache=True, **given)
        logits.append(out.logits)
        at += chunk
        if poisoned:
            poison(cache)
    return logits


def random_ids(rows, columns, seed=3):
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, columns), generator=generator)


def greedy(model, ids, count, cache=None, **given):
    """The greedy continuation by generate(), prompt included."""
    # without a mask generate() would hide each pad token that a random model has said
    given.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=count, do_sample=False, cache=cache, **given)


@pytest.fixture
def tiny():
    """What the tests share."""
    return SimpleNamespace(
        make=make,
        poison=poison,
        steps=steps,
        ids=random_ids,
        greedy=greedy,
        window=WINDOW,
        block=BLOCK,
    )
