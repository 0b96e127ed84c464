"""Writes a Llama model of a GGUF file as a Hugging Face directory, float32, for a vLLM to serve.

`make_model.py FILE.gguf DIRECTORY`, with halfmoon's environment and its test tools (transformers).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

from halfmoon.workers.model.loading.gguf import GgufFile, unpermute_rotary

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip

#: The model's own template, which knows no tools, with those of Hermes.
TEMPLATE = """{%- if messages[0].role != 'system' -%}
{%- set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' -%}
{%- else -%}
{%- set system = messages[0].content -%}
{%- endif -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if tools -%}
{{- '\\n\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
{%- if not (loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make(source: Path, directory: Path) -> None:
    file = GgufFile(source)
    about = {name.removeprefix("llama."): value for name, value in file.metadata.items()}
    heads = {"attn_q": about["attention.head_count"], "attn_k": about["attention.head_count_kv"]}
    state: dict[str, torch.Tensor] = {}
    for name in file.tensors:
        parts = name.removesuffix(".weight").split(".")
        if parts[0] == "rope_freqs":
            continue
        values = file.tensor_f32(name)
        if parts[0] == "blk":
            if parts[2] in heads:
                values = unpermute_rotary(values, heads[parts[2]])
            key = f"model.layers.{parts[1]}.{PARTS[parts[2]]}.weight"
        else:
            key = f"{NAMES[parts[0]]}.weight"
        state[key] = torch.from_numpy(np.ascontiguousarray(values))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=about["embedding_length"],
        intermediate_size=about["feed_forward_length"],
        num_hidden_layers=about["block_count"],
        num_attention_heads=about["attention.head_count"],
        num_key_value_heads=about["attention.head_count_kv"],
        max_position_embeddings=about["context_length"],
        rms_norm_eps=round(about["attention.layer_norm_rms_epsilon"], 9),
        rope_theta=float(about["rope.freq_base"]),
        tie_word_embeddings="lm_head.weight" not in state,
        bos_token_id=about["tokenizer.ggml.bos_token_id"],
        eos_token_id=about["tokenizer.ggml.eos_token_id"],
        pad_token_id=2,
    )
    config.dtype = torch.float32
    config.save_pretrained(directory)
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
