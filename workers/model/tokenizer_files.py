"""Builds the tokenizer of a model from its files: a GGUF's metadata, or a Hugging Face directory.

A `tokenizers.Tokenizer` recognises control tokens in any text it is given. Two are built, therefore:
one for templates, which does, and one for what users write, which does not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from halfmoon.workers.model.config import ModelNotFound, ModelUnsupported
from halfmoon.workers.model.files import find_model, load_config
from halfmoon.workers.model.gguf import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`with_control` recognises control tokens, `without_control` reads them as plain text."""

    with_control: tokenizers.Tokenizer
    without_control: tokenizers.Tokenizer
    control: dict[str, int]
    chat_template: str | None
    bos_token: str
    eos_token: str
    eos_ids: frozenset[int]


def read_tokenizer(name_or_path: str) -> TokenizerFiles:
    source = find_model(name_or_path)
    eos_ids = frozenset(load_config(name_or_path).eos_token_ids)
    if source.kind == "gguf":
        return _from_gguf(source.path, eos_ids)
    return _from_huggingface(source.path, eos_ids)


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    match kind:
        case "smollm":
            return pre_tokenizers.Sequence([
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ])  # fmt: skip
        case "gpt-2" | "default":
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        case "llama-bpe" | "llama3" | "llama-v3":
            pattern = _LLAMA3
        case "qwen2":
            pattern = _QWEN2
        case _:
            raise ModelUnsupported("tokenizer.ggml.pre", kind, "smollm, gpt-2, llama-bpe, qwen2")
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def _from_gguf(path: Path, eos_ids: frozenset[int]) -> TokenizerFiles:
    file = GgufFile(path)
    fields = file.metadata
    file.close()
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ModelUnsupported(
            "tokenizer.ggml.model", fields.get("tokenizer.ggml.model"), "gpt2 (byte-level BPE)"
        )
    names: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields.get("tokenizer.ggml.token_type", [1] * len(names))
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    control = {name: i for i, (name, kind) in enumerate(zip(names, kinds, strict=True)) if kind == _CONTROL}
    defined = [name for name, kind in zip(names, kinds, strict=True) if kind == _USER_DEFINED]

    kind = fields.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _pre_tokenizer(kind)

    def build() -> tokenizers.Tokenizer:
        vocab = {name: i for i, name in enumerate(names)}
        built = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.startswith("llama"))
        )
        built.pre_tokenizer = pre_tokenizer
        built.decoder = decoders.ByteLevel()
        built.add_tokens([AddedToken(name, normalized=False) for name in defined])
        built.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
        return built

    def token(field: str) -> str:
        number = fields.get(f"tokenizer.ggml.{field}_token_id")
        return names[number] if number is not None else ""

    return TokenizerFiles(
        build(), _blind(build()), control, fields.get("tokenizer.chat_template"), token("bos"), token("eos"),
        eos_ids,
    )  # fmt: skip


def _from_huggingface(folder: Path, eos_ids: frozenset[int]) -> TokenizerFiles:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} holds no tokenizer.json")
    settings_path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(settings_path.read_text()) if settings_path.is_file() else {}
    built = tokenizers.Tokenizer.from_file(str(path))
    control = {token.content: i for i, token in built.get_added_tokens_decoder().items() if token.special}
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item["name"] == "default"), None)
    if template is None and (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text()
    eos = _token_text(settings.get("eos_token"))
    if eos and (number := built.token_to_id(eos)) is not None:
        eos_ids |= {number}
    blind = _blind(tokenizers.Tokenizer.from_file(str(path)))
    return TokenizerFiles(
        built, blind, control, template, _token_text(settings.get("bos_token")), eos, eos_ids
    )


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value or "")


def _blind(built: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, to which control tokens are text like any other."""
    built.encode_special_tokens = True
    return built
