"""An independent implementation to compare with: transformers' `LlamaForCausalLM` with our dequantised
weights.

transformers' own reading of this GGUF splits digits wrongly, so token ids come from our tokenizer; logits are
theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel, ModelConfig


def state_dict(model: LoadedModel) -> dict[str, torch.Tensor]:
    """Our fused weights under the names of transformers."""
    config, weights = model.config, model.weights
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    state = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["norm"]}
    state["lm_head.weight"] = weights["embed"] if config.tied else weights["head"]
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        for suffix in ("", "_bias") if config.attention_bias else ("",):
            q, k, v = weights[f"{ours}.qkv{suffix}"].split([query, key, key])
            leaf = "bias" if suffix else "weight"
            state |= {
                f"{theirs}.self_attn.{n}_proj.{leaf}": part for n, part in zip("qkv", (q, k, v), strict=True)
            }
        gate, up = weights[f"{ours}.gate_up"].chunk(2)
        state[f"{theirs}.mlp.gate_proj.weight"], state[f"{theirs}.mlp.up_proj.weight"] = gate, up
        state[f"{theirs}.mlp.down_proj.weight"] = weights[f"{ours}.down"]
        state[f"{theirs}.self_attn.o_proj.weight"] = weights[f"{ours}.out"]
        state[f"{theirs}.input_layernorm.weight"] = weights[f"{ours}.attention_norm"]
        state[f"{theirs}.post_attention_layernorm.weight"] = weights[f"{ours}.ffn_norm"]
    return state


def reference_model(model: LoadedModel) -> Any:
    """The same llama in transformers, in f32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: ModelConfig = model.config
    assert config.rope_scaling is None
    theirs = LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_tokens_max,
        rms_norm_eps=config.rms_eps,
        rope_theta=config.rope_base,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        tie_word_embeddings=config.tied,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_ids[0],
    )
    with torch.device("meta"):
        reference = LlamaForCausalLM(theirs)
    reference = reference.to_empty(device="cpu")
    missing, unexpected = reference.load_state_dict(state_dict(model), strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    # Its frequencies are not in the state.
    reference.model.rotary_emb = type(reference.model.rotary_emb)(theirs)
    return reference.float().eval()


@torch.inference_mode()
def reference_logits(reference: Any, prompt: Sequence[int]) -> torch.Tensor:
    """f32 `[vocab]` of the last token."""
    logits: torch.Tensor = reference(torch.tensor([list(prompt)]), logits_to_keep=1).logits[0, -1]
    return logits


@torch.inference_mode()
def reference_logprobs(reference: Any, prompt: Sequence[int]) -> torch.Tensor:
    """f32 `[tokens - 1, vocab]`: of what follows each token of the prompt but the last."""
    logits: torch.Tensor = reference(torch.tensor([list(prompt)])).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)


@torch.inference_mode()
def reference_greedy(reference: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """`tokens` greedy tokens after `prompt`, past any end token."""
    past, ids, found = None, torch.tensor([list(prompt)]), list[int]()
    for _ in range(tokens):
        answer = reference(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, token = answer.past_key_values, int(answer.logits[0, -1].argmax())
        found.append(token)
        ids = torch.tensor([[token]])
    return found


def prefill(
    engine: Engine, prompt: Sequence[int], table: Sequence[int], *, start: int = 0, chunk_tokens: int = 0
) -> torch.Tensor:
    """The last token's logits after prefill of `prompt[start:]` in chunks (of a block, unless told)."""
    step, logits = chunk_tokens or engine.block_tokens, None
    for at in range(start, len(prompt), step):
        chunk = prompt[at : at + step]
        logits = engine.prefill_chunk(chunk, at, table, want_logits=at + len(chunk) == len(prompt))
    assert logits is not None
    return logits


def generate(engine: Engine, prompt: Sequence[int], tokens: int) -> list[int]:
    """`tokens` greedy tokens by the engine, alone, from a cold cache."""
    table = engine.allocator.allocate(-(-(len(prompt) + tokens) // engine.block_tokens))
    found = engine.argmax(prefill(engine, prompt, table))
    for at in range(len(prompt), len(prompt) + tokens - 1):
        found += engine.argmax(engine.decode(found[-1:], [at], [table]))
    engine.allocator.free(table)
    return found
