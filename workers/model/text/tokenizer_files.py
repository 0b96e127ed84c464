"""Builds the tokenizer of a model from its files: a GGUF's metadata, or a Hugging Face directory.

A `tokenizers.Tokenizer` recognises control tokens in any text it is given. Two are built, therefore: one for templates,
which does, and one for users' text, which does not.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

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
    """`with_control` recognises control tokens, `without_control` reads them as plain text; `within` does, too, and
    takes no text for the beginning of a prompt.
    """

    with_control: tokenizers.Tokenizer
    without_control: tokenizers.Tokenizer
    within: tokenizers.Tokenizer
    control: dict[str, int]
    chat_template: str | None
    bos_token: str
    eos_token: str
    eos_ids: frozenset[int]
    template_file: Path
    tokenizer_file: Path
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
    except BaseException as error:
        # The library raises plain Exception, and its panics are no Exception at all.
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

    around = _gguf_around(fields, names, begins=kind.startswith("llama"))

    def build() -> tokenizers.Tokenizer:
        built = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.startswith("llama"))
        )
        built.pre_tokenizer = pre_tokenizer
        built.decoder = decoders.ByteLevel()
        built.add_tokens([AddedToken(name, normalized=False) for name in defined])
        built.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
        built.post_processor = around
        return built

    def token(field: str) -> str:
        ids = fields.token_ids(f"tokenizer.ggml.{field}_token_id", len(names))
        return names[ids[0]] if ids else ""

    with_control = _built("tokenizer.ggml.merges", build)
    _check_vocabulary("tokenizer.ggml.tokens", with_control, config.vocab)
    template = _gguf_template(fields, "tokenizer.chat_template")
    tool_template = _gguf_template(fields, f"tokenizer.chat_template.{TOOL_USE}")
    bos, eos = token("bos"), token("eos")
    without_control = _blind(build())
    return TokenizerFiles(
        with_control, without_control, without_control, control, template, bos, eos, frozenset(config.eos_token_ids),
        path, path, quick=True,
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


def _gguf_around(fields: Fields, names: list[str], *, begins: bool) -> processors.TemplateProcessing:
    """Puts the tokens around every text that the file asks for. `begins`: llama.cpp's default for `add_bos_token`."""
    template, specials = ["$A"], []
    for side, default in (("bos", begins), ("eos", False)):
        ids = fields.token_ids(f"tokenizer.ggml.{side}_token_id", len(names))
        field = f"tokenizer.ggml.add_{side}_token"
        asked = fields.flag(field)
        if asked and not ids:
            raise ModelBroken(field, f"is true, but the file has no tokenizer.ggml.{side}_token_id")
        if asked or (default and ids and fields.get(field) is None):
            template = [side, *template] if side == "bos" else [*template, side]
            specials.append({"id": side, "ids": [ids[0]], "tokens": [names[ids[0]]]})
    return processors.TemplateProcessing(single=template, special_tokens=specials)


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
    settings_path = folder / "tokenizer_config.json"
    map_path = folder / "special_tokens_map.json"
    mapped = read_optional_json(map_path)
    with in_file(map_path):
        for role in ("bos_token", "eos_token"):
            _token_text(mapped, role)
        more = _more_specials(mapped)
    settings = {"additional_special_tokens": more} | with_token_map(read_optional_json(settings_path), mapped)
    with in_file(path):
        built = _from_json(text)
    with in_file(settings_path):
        bos, eos = _token_text(settings, "bos_token"), _token_text(settings, "eos_token")
        added = _add_tokens(built, settings, [bos, eos])
    with in_file(path):
        _check_vocabulary("vocab", built, config.vocab)
        control = {token.content: i for i, token in built.get_added_tokens_decoder().items() if token.special}
        _check_control("added_tokens", control)
        blind = _blind(_from_json(_without_words(built.to_str() if added else text, control)))
        quick = probe(text, built)
    templates = read_templates(folder, settings)
    template, template_file = templates.get(DEFAULT, (None, settings_path))
    eos_ids = frozenset(config.eos_token_ids)
    if eos and (number := built.token_to_id(eos)) is not None:
        eos_ids |= {number}
    return TokenizerFiles(
        built, blind, _within(blind), control, template, bos, eos, eos_ids, template_file, path, quick,
        tool_template=templates.get(TOOL_USE), template_tokens=template_tokens(settings),
    )  # fmt: skip


def _from_json(text: str) -> tokenizers.Tokenizer:
    """The content of a tokenizer.json as a tokenizer that gives every text whole. Raises `ModelBroken`."""
    built = _built("content", lambda: tokenizers.Tokenizer.from_str(text))
    # All three are left over from training; transformers resets the first two.
    built.no_truncation()
    built.no_padding()
    if isinstance(built.model, models.BPE):
        built.model.dropout = None  # with it, equal prompts get different tokens
    return built


def _add_tokens(built: tokenizers.Tokenizer, settings: dict[str, Any], named: list[str]) -> bool:
    """Adds added tokens that tokenizer_config.json has and tokenizer.json has not; whether there was any.

    `named`: tokens with a role (`bos_token`), control tokens wherever the vocabulary has them. Raises `ModelBroken`.
    """
    present = built.get_added_tokens_decoder()
    entries = Fields(settings).inner("added_tokens_decoder")
    changed = False
    for number, key in sorted((_token_id(key), key) for key in settings.get("added_tokens_decoder") or {}):
        entry = entries.inner(key)
        name = entry.text("content")
        special = entry.flag("special") or name in named
        known = present.get(number)
        if known is not None and known.content == name and (known.special or not special):
            continue
        token = AddedToken(
            name, special=special, single_word=entry.flag("single_word"), lstrip=entry.flag("lstrip"),
            rstrip=entry.flag("rstrip"), normalized=entry.get("normalized") is True,
        )  # fmt: skip
        built.add_special_tokens([token]) if special else built.add_tokens([token])
        if built.token_to_id(name) != number:
            where = f"is {shown(name)}, which is {built.token_to_id(name)} in tokenizer.json"
            raise ModelBroken(f"added_tokens_decoder.{key}", where)
        changed = True
    special_names = {token.content for token in built.get_added_tokens_decoder().values() if token.special}
    for name in named + _more_specials(settings):
        if name and name not in special_names and built.token_to_id(name) is not None:
            built.add_special_tokens([AddedToken(name, special=True, normalized=False)])
            changed = True
    return changed


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise ModelBroken("added_tokens_decoder", f"has the name {shown(key)}; it must be a token id")
    return int(key)


def _more_specials(settings: dict[str, Any]) -> list[str]:
    """Those of `additional_special_tokens`, each a text or an object with its content. Raises `ModelBroken`."""
    field = "additional_special_tokens"
    listed = settings.get(field) or []
    if not isinstance(listed, list):
        raise ModelBroken(field, f"is {shown(listed)}; it must be a list of tokens")
    return [_token_text({field: item}, field) for item in listed]


def _without_words(text: str, control: Mapping[str, int]) -> str:
    """The tokenizer.json, whose model cannot find a control token in a text as if it were a word.

    Every model but BPE looks words up in its vocabulary, and BPE does with `ignore_merges`. The names there become ones
    that nobody can guess.
    """
    content = json.loads(text)
    model = content["model"]
    if "merges" in model and not model.get("ignore_merges"):
        return text
    vocab = model["vocab"]
    names = [pair[0] for pair in vocab] if isinstance(vocab, list) else vocab
    unknown = model.get("unk_token")
    hidden = {
        name: f"{secrets.token_hex(16)} {name}" for name in names if name in control and name != unknown
    }
    if not hidden:
        return text
    if isinstance(vocab, list):
        model["vocab"] = [[hidden.get(name, name), score] for name, score in vocab]
    else:
        model["vocab"] = {hidden.get(name, name): i for name, i in vocab.items()}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in hidden]
    return json.dumps(content)


def _within(blind: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same for text behind other text: a Metaspace of scheme "first" marks only the beginning of a prompt."""
    if blind.pre_tokenizer is None or b"Metaspace" not in blind.pre_tokenizer.__getstate__():
        return blind  # without writing out a vocabulary of a hundred thousand words
    content = json.loads(blind.to_str())
    left = [content["pre_tokenizer"]]
    found = False
    while left:
        step = left.pop() or {}
        left += step.get("pretokenizers", ())
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"], found = "never", True
    return _blind(_from_json(json.dumps(content))) if found else blind


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
