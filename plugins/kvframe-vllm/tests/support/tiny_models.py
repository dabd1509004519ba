"""Tiny random models of the kinds that matter, as folders that vLLM serves on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.3,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 64,
        "layer_types": ALTERNATING,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 32,
    },
    "gptoss": {
        "model_type": "gpt_oss",
        "sliding_window": 64,
        "layer_types": ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mla": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 4,
        "n_group": 1,
        "topk_group": 1,
    },
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gptoss": "GptOssForCausalLM",
    "mla": "DeepseekV3ForCausalLM",
}


def make_model(name: str, folder: Path) -> Path:
    """Write the model, if it is not there; the same weights every time."""
    path = folder / name
    if (path / "model.safetensors").exists():
        return path
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    words = dict(COMMON) | MODELS[name]
    config = AutoConfig.for_model(words.pop("model_type"), **words)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    written["architectures"] = [ARCHITECTURES[name]]
    (path / "config.json").write_text(json.dumps(written, indent=1))
    return path


if __name__ == "__main__":
    import sys

    for each in sys.argv[2:] or MODELS:
        make_model(each, Path(sys.argv[1]))
