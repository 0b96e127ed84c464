"""Model directories of `tokenizer_families`, whose tokenizers are trained here, and the chats that each is asked.

Nothing but `tokenizers` is imported: the recorder runs where halfmoon is not installed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.workers.tokenizer_families import FAMILIES, Family

LINES = [
    "Be brief. You are a helpful assistant.", "Hello there, 12 moons! And now? Well, it is a half moon.",
    "user assistant system model tool function name arguments city Rome weather", "Cutting Knowledge Date: 26 Jul 2024",
]  # fmt: skip
TEXT = "Hello there, 12 moons!"
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": TEXT}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ARGUMENTS = {"city": "Zürich", "days": 2}


def chats(family: Family, *, recorded: bool) -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Messages and options by name. `recorded`: as transformers takes them; else as a request has them."""
    as_text = not recorded or family.arguments == "text"
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False) if as_text else ARGUMENTS
    call = {"id": "abcdefg12", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    calling = {"role": "assistant", "content": family.content if recorded else "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "abcdefg12", "name": "weather", "content": "12 degrees"}
    answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nWell, it is."}
    talk = [USER, answer, {"role": "user", "content": " And now? "}]
    found = {
        "user": ([USER], {"add_generation_prompt": True}),
        "talk": (talk, {"add_generation_prompt": True}),
        "system": ([SYSTEM, *talk], {"add_generation_prompt": True}),
        "closed": (talk[:2], {"add_generation_prompt": False}),
        "turned": ([USER, USER], {"add_generation_prompt": True}),
        "switched": ([USER], {"add_generation_prompt": True, "enable_thinking": False}),
        "continued": (
            [USER, {"role": "assistant", "content": " Well, it "}],
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
        "continued a letter": (
            [USER, {"role": "assistant", "content": "e"}],
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    }
    if family.tools or family.template.count("tool_calls"):
        tools = {"tools": [TOOL]} if family.tools else {}
        found["calls"] = ([USER, calling, result], {"add_generation_prompt": True, **tools})
    if family.tools:
        found["tools"] = ([SYSTEM, USER], {"add_generation_prompt": True, "tools": [TOOL]})
    return found


def write(name: str, folder: Path) -> Path:
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    built = _bytes(family) if family.spaces == "bytes" else _pieces(family)
    built.add_special_tokens(
        [
            AddedToken(each, special=True, normalized=False, rstrip=family.rstrip, lstrip=family.lstrip)
            for each in family.special
        ]
    )
    built.add_tokens([AddedToken(each, normalized=False) for each in family.plain])
    told = json.loads(built.to_str()) | family.tokenizer
    (folder / "tokenizer.json").write_text(json.dumps(told, ensure_ascii=False))
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8,
             "vocab_size": 1000, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}  # fmt: skip
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": family.template,
    }
    settings |= {key: value for key, value in (("bos_token", family.bos), ("eos_token", family.eos)) if value}
    files = {
        "config.json": {"model_type": "llama", **sizes},
        "tokenizer_config.json": settings | family.settings,
        **family.files,
    }
    for file, content in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def vocabulary_digest(folder: Path) -> str:
    """Of the tokens in the order of their ids: the same wherever the tokenizer is trained."""
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    tokens = sorted(found, key=lambda token: found[token])
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()[:16]


def _bytes(family: Family) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    built.train_from_iterator(LINES, trainer)
    return built


def _pieces(family: Family) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    built.train_from_iterator(LINES, trainer)
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return built
