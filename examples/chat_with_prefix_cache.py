"""A chat in which each turn computes only what is new, and two users who share a system prompt.

The model is tiny and random, so that nothing is downloaded: its answers are noise, the numbers are the point. For real
answers put `AutoModelForCausalLM.from_pretrained(...)` in place of `tiny_model`, and its tokenizer in place of bytes.

Run: pip install 'kvframe-transformers[all]', then python examples/chat_with_prefix_cache.py
"""

from __future__ import annotations

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvframe_transformers import PagedCachePool

SYSTEM = "You are a patient assistant. You answer in one short sentence, and you never make things up. "
QUESTIONS = (
    "What does a KV cache keep?",
    "Why does it grow?",
    "What is a sliding window?",
    "Who frees its blocks?",
    "Thanks. Good night!",
)
NEW_TOKENS = 8


def tiny_model() -> Gemma3ForCausalLM:
    """Sliding layers beside full ones, with random weights; its tokens are bytes."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=64,
        max_position_embeddings=2048,
    )
    model = Gemma3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def encode(text: str) -> torch.Tensor:
    """Text to ids, [1, tokens]."""
    return torch.tensor([list(text.encode())])


def answer(model: Gemma3ForCausalLM, ids: torch.Tensor, pool: PagedCachePool | None) -> torch.Tensor:
    """The conversation with the model's answer."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    if pool is None:
        return model.generate(ids, **given)
    with pool.cache(ids) as cache:  # begins with all that the pool has of these ids
        return model.generate(ids, **given, cache=cache)


def main() -> None:
    """Two chats; every answer is compared with that of a model without our cache."""
    model = tiny_model()
    pool = PagedCachePool.for_model(model, "8MiB", max_batch_size=4)
    print(f"{pool.prefill(encode(SYSTEM))} tokens of the system prompt are in blocks")
    for user in ("Ada", "Bob"):
        print(f"\n{user}")
        ids = encode(f"{SYSTEM}I am {user}. ")
        for question in QUESTIONS:
            ids = torch.cat([ids, encode(question)], 1)
            before = pool.statistics()
            said = answer(model, ids, pool)
            after = pool.statistics()
            found = after.saved_tokens - before.saved_tokens
            computed = after.computed_tokens - before.computed_tokens
            same = torch.equal(said, answer(model, ids, None))
            print(
                f"  prompt of {ids.shape[1]:>3}: {found:>3} found, {computed:>2} computed, "
                f"{'the same answer' if same else 'ANOTHER ANSWER'} as without the pool"
            )
            ids = said
    total = pool.statistics()
    share = total.saved_tokens / total.prompt_tokens
    print(
        f"\n{total.saved_tokens:,} of {total.prompt_tokens:,} prompt tokens ({share:.0%}) were not computed again"
    )


if __name__ == "__main__":
    main()
