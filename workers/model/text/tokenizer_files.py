"""Builds the tokenizer of a model from its files: a GGUF's metadata, or a Hugging Face directory.

A `tokenizers.Tokenizer` recognises control tokens in any text it is given. Two are built, therefore:
one for templates, which does, and one for what users write, which does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from halfmoon.workers.model.loading.config import ModelConfig, ModelError, ModelNotFound, ModelUnsupported
from halfmoon.workers.model.loading.errors import ModelBroken, in_file, shown
from halfmoon.workers.model.loading.fields import Fields, read_optional_json, read_text
from halfmoon.workers.model.loading.files import find_model, load_config
from halfmoon.workers.model.loading.gguf import GgufFile
from halfmoon.workers.model.text.pre_tokenizer_probe import LLAMA3, QWEN2, probe, quiet_panics
from halfmoon.workers.model.text.template_files import (
    DEFAULT,
    TOOL_USE,
    TemplateSource,
    check_length,
    read_templates,
    template_tokens,
    with_token_map,
)

T = TypeVar("T")

TOKENIZER_BYTES_MAX = 256 << 20
_CONTROL, _USER_DEFINED = 3, 4


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
    template_file: Path
    quick: bool
    """Whether every step of the pre-tokenizer is one whose time is known to grow with the text alone."""
    tool_template: TemplateSource | None = None
    """In place of `chat_template` for a chat with tools."""
    template_tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens by the names that templates have for them."""


def read_tokenizer(name_or_path: str) -> TokenizerFiles:
    """Raises `ModelError`, in one line that names file and field."""
    source = find_model(name_or_path)
    if source.kind == "gguf":
        with in_file(source.path):
            return _from_gguf(source.path)
    return _from_huggingface(source.path, load_config(name_or_path))


def _built(field: str, build: Callable[[], T]) -> T:
    """Runs a part of the tokenizers library over a file's content. Raises `ModelBroken` with the library's words."""
    try:
        with quiet_panics():
            return build()
    except (ModelError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except (
        BaseException
    ) as error:  # the library raises plain Exception, and its panics are no Exception at all
        raise ModelBroken(field, f"is refused by the tokenizer: {str(error)[:200]}") from None


def _check_vocabulary(field: str, built: tokenizers.Tokenizer, vocab: int) -> None:
    """Raises `ModelBroken`. An id that the model has no row for would end the worker that it reaches."""
    name, largest = max(built.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if largest < 0:
        raise ModelBroken(field, "is empty")
    if largest >= vocab:
        raise ModelBroken(
            field, f"gives {shown(name)} the id {largest}; the model's vocabulary is {vocab} tokens"
        )


def _check_control(field: str, control: dict[str, int]) -> None:
    if "" in control:
        raise ModelBroken(field, f"has an empty control token, id {control['']}")


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
            pattern = LLAMA3
        case "qwen2":
            pattern = QWEN2
        case _:
            raise ModelUnsupported("tokenizer.ggml.pre", kind, "smollm, gpt-2, llama-bpe, qwen2")
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def _from_gguf(path: Path) -> TokenizerFiles:
    with contextlib.closing(GgufFile(path)) as file:
        config, fields = file.config(), Fields(file.metadata)
    model = fields.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelUnsupported("tokenizer.ggml.model", model, "gpt2 (byte-level BPE)")
    kind = fields.text("tokenizer.ggml.pre", default="default")
    pre_tokenizer = _pre_tokenizer(kind)
    names = fields.strings("tokenizer.ggml.tokens")
    vocab = {name: i for i, name in enumerate(names)}
    if len(vocab) != len(names):
        twice = next(name for i, name in enumerate(names) if vocab[name] != i)
        raise ModelBroken("tokenizer.ggml.tokens", f"has {shown(twice)} twice")
    kinds = _token_types(fields, len(names))
    merges = [_merge(i, merge) for i, merge in enumerate(fields.strings("tokenizer.ggml.merges"))]
    control = {name: i for i, (name, kind) in enumerate(zip(names, kinds, strict=True)) if kind == _CONTROL}
    defined = [name for name, kind in zip(names, kinds, strict=True) if kind == _USER_DEFINED]
    _check_control("tokenizer.ggml.tokens", control)

    def build() -> tokenizers.Tokenizer:
        built = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.startswith("llama"))
        )
        built.pre_tokenizer = pre_tokenizer
        built.decoder = decoders.ByteLevel()
        built.add_tokens([AddedToken(name, normalized=False) for name in defined])
        built.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
        return built

    def token(field: str) -> str:
        ids = fields.token_ids(f"tokenizer.ggml.{field}_token_id", len(names))
        return names[ids[0]] if ids else ""

    with_control = _built("tokenizer.ggml.merges", build)
    _check_vocabulary("tokenizer.ggml.tokens", with_control, config.vocab)
    template = _gguf_template(fields, "tokenizer.chat_template")
    tool_template = _gguf_template(fields, f"tokenizer.chat_template.{TOOL_USE}")
    bos, eos = token("bos"), token("eos")
    return TokenizerFiles(
        with_control, _blind(build()), control, template, bos, eos, frozenset(config.eos_token_ids), path, quick=True,
        tool_template=None if tool_template is None else TemplateSource(tool_template, path),
        template_tokens={
            "bos_token": bos, "eos_token": eos, "unk_token": token("unknown"), "pad_token": token("padding"),
        },
    )  # fmt: skip


def _gguf_template(fields: Fields, name: str) -> str | None:
    if fields.get(name) is None:
        return None
    template = fields.text(name)
    check_length(name, template)
    return template


def _token_types(fields: Fields, count: int) -> list[int]:
    field = "tokenizer.ggml.token_type"
    kinds = fields.get(field)
    if kinds is None:
        return [1] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ModelBroken(field, f"is {shown(kinds)}; it must have an item for each of {count} tokens")
    return kinds


def _merge(number: int, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelBroken(
            "tokenizer.ggml.merges", f"has item {number}, {shown(merge)}; it must be two tokens"
        )
    return left, right


def _from_huggingface(folder: Path, config: ModelConfig) -> TokenizerFiles:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} holds no tokenizer.json")
    text = read_text(path, TOKENIZER_BYTES_MAX)
    with in_file(path):
        built = _built("content", lambda: tokenizers.Tokenizer.from_str(text))
        blind = _blind(_built("content", lambda: tokenizers.Tokenizer.from_str(text)))
        _check_vocabulary("vocab", built, config.vocab)
        control = {token.content: i for i, token in built.get_added_tokens_decoder().items() if token.special}
        _check_control("added_tokens", control)
        quick = probe(text, built)
    settings_path = folder / "tokenizer_config.json"
    settings = with_token_map(folder, read_optional_json(settings_path))
    with in_file(settings_path):
        bos, eos = _token_text(settings, "bos_token"), _token_text(settings, "eos_token")
    templates = read_templates(folder, settings)
    template, template_file = templates.get(DEFAULT, (None, settings_path))
    eos_ids = frozenset(config.eos_token_ids)
    if eos and (number := built.token_to_id(eos)) is not None:
        eos_ids |= {number}
    return TokenizerFiles(
        built, blind, control, template, bos, eos, eos_ids, template_file, quick,
        tool_template=templates.get(TOOL_USE), template_tokens=template_tokens(settings),
    )  # fmt: skip


def _token_text(settings: dict[str, Any], name: str) -> str:
    """A token that is named as itself, or as an object with its content. Raises `ModelBroken`."""
    value = settings.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise ModelBroken(name, f"is {shown(value)}; it must be a token")
    return content or ""


def _blind(built: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, to which control tokens are text like any other."""
    built.encode_special_tokens = True
    return built
