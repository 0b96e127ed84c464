"""Tiny whole models, made byte by byte, so that any part of them can be made wrong: a GGUF file, a directory."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import ModelError, load_model, model_fingerprint
from halfmoon.workers.model.text.tokenizer import ChatTemplateError, TextNotEncoded, Tokenizer

TOKENS = ["<|end|>", "<|go|>", "a", "b", "c", "Ġ", "ab", "Ċ", "1", "2", "!", "d", "e", "f", "g", "h"]
TEMPLATE = "{% for m in messages %}<|go|>{{ m.content }}<|end|>{% endfor %}"
SHAPES = {
    "token_embd": (16, 8), "output_norm": (8,), "output": (16, 8), "blk.0.attn_norm": (8,), "blk.0.attn_q": (8, 8),
    "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8), "blk.0.ffn_norm": (8,),
    "blk.0.ffn_gate": (12, 8), "blk.0.ffn_up": (12, 8), "blk.0.ffn_down": (8, 12),
}  # fmt: skip
U8, I32, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 4, 6, 7, 8, 9, 10
FORMS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass
class Tensor:
    """`shape` rows first; None for `offset` means: behind the one before."""

    name: str
    shape: tuple[int, ...]
    kind: int = 0
    offset: int | None = None
    content: bytes = b""


@dataclass
class Gguf:
    """`fields`: name to type and value; an array's value is its items' type and the items."""

    fields: dict[str, tuple[int, Any]]
    tensors: list[Tensor]
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    field_count: int | None = None
    tail: bytes = b""
    extra: list[tuple[str, int, Any]] = field(default_factory=list)

    def encoded(self) -> bytes:
        entries = [(name, *value) for name, value in self.fields.items()] + self.extra
        counts = (
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(entries) if self.field_count is None else self.field_count,
        )
        head = self.magic + struct.pack("<IQQ", self.version, *counts)
        for name, kind, value in entries:
            head += _text(name) + struct.pack("<I", kind) + _value(kind, value)
        contents = b""
        for tensor in self.tensors:
            offset = len(contents) if tensor.offset is None else tensor.offset
            head += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
            head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
            head += struct.pack("<IQ", tensor.kind, offset)
            contents += tensor.content + bytes(-len(tensor.content) % 32)
        return head + bytes(-len(head) % 32) + contents + self.tail


def _text(value: Any) -> bytes:
    raw = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    """As GGUF writes it; raw bytes pass as they are."""
    if isinstance(value, bytes):
        return value
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        item_kind, items = value
        return struct.pack("<IQ", item_kind, len(items)) + b"".join(_value(item_kind, item) for item in items)
    return struct.pack(FORMS[kind], value)


def gguf(architecture: str = "llama") -> Gguf:
    """A valid one: 1 layer, 8 wide, 16 tokens."""
    kind = architecture
    fields: dict[str, tuple[int, Any]] = {
        "general.architecture": (STRING, kind),
        "general.alignment": (U32, 32),
        f"{kind}.block_count": (U32, 1),
        f"{kind}.context_length": (U32, 64),
        f"{kind}.embedding_length": (U32, 8),
        f"{kind}.feed_forward_length": (U32, 12),
        f"{kind}.attention.head_count": (U32, 2),
        f"{kind}.attention.head_count_kv": (U32, 1),
        f"{kind}.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        f"{kind}.rope.freq_base": (F32, 10000.0),
        f"{kind}.rope.dimension_count": (U32, 4),
        f"{kind}.vocab_size": (U32, 16),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "smollm"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, list(TOKENS))),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [3, 3] + [1] * 14)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 0),
        "tokenizer.chat_template": (STRING, TEMPLATE),
    }
    tensors = [
        Tensor(f"{name}.weight", shape, content=values(f"{name}.weight", shape))
        for name, shape in SHAPES.items()
    ]
    return Gguf(fields, tensors)


@cache
def values(name: str, shape: tuple[int, ...]) -> bytes:
    """f32, small, the same for the same name."""
    seed = sum(name.encode())
    return struct.pack(f"<{prod(shape)}f", *(((seed + i) % 13 - 6) / 8 for i in range(prod(shape))))


@dataclass
class Directory:
    """Files by name: a dict or list is written as JSON, text and bytes as they are."""

    files: dict[str, Any]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            raw = content if isinstance(content, bytes) else None
            if raw is None:
                text = content if isinstance(content, str) else json.dumps(content)
                raw = text.encode(errors="surrogatepass")
            (folder / name).write_bytes(raw)
        return folder


_THEIRS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "blk.0.attn_norm": "model.layers.0.input_layernorm", "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj", "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj", "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj", "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}  # fmt: skip


def safetensors_header(names: dict[str, str] | None = None) -> tuple[dict[str, Any], bytes]:
    """The header as JSON, and the bytes behind it."""
    header: dict[str, Any] = {}
    contents = b""
    for ours, theirs in (names or _THEIRS).items():
        raw = values(ours, SHAPES[ours])
        place = [len(contents), len(contents) + len(raw)]
        header[f"{theirs}.weight"] = {"dtype": "F32", "shape": list(SHAPES[ours]), "data_offsets": place}
        contents += raw
    return header, contents


def safetensors(header: Any, contents: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + contents


CONFIG = {
    "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 1, "intermediate_size": 12, "vocab_size": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 0, "hidden_act": "silu", "head_dim": 4,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
}  # fmt: skip
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": i, "content": TOKENS[i], "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for i in (0, 1)
    ],
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{N}|[^\p{N}]+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    },
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {name: i for i, name in enumerate(TOKENS)}, "merges": [["a", "b"]],
    },
}  # fmt: skip
SETTINGS = {"chat_template": TEMPLATE, "bos_token": {"content": "<|go|>"}, "eos_token": "<|end|>"}


def directory() -> Directory:
    """A valid one, of the same sizes as `gguf`."""
    return Directory(
        {
            "config.json": copy.deepcopy(CONFIG),
            "generation_config.json": {"eos_token_id": [0]},
            "tokenizer.json": copy.deepcopy(TOKENIZER),
            "tokenizer_config.json": copy.deepcopy(SETTINGS),
            "model.safetensors": safetensors(*safetensors_header()),
        }
    )


def two_layers() -> Directory:
    """The made model, whose only layer is there twice: what enters the last one has gone through another."""
    model = directory()
    header, contents = safetensors_header()
    for name in [name for name in header if "layers.0" in name]:
        first, end = header[name]["data_offsets"]
        place = [len(contents), len(contents) + end - first]
        header[name.replace("layers.0", "layers.1")] = {**header[name], "data_offsets": place}
        contents += contents[first:end]
    model.files["model.safetensors"] = safetensors(header, contents)
    model.files["config.json"]["num_hidden_layers"] = 2
    return model


SENTENCES = [
    "The capital of France is Paris.", "the cat sat on the mat  and looked at the moon", "Half moons, 1024 of them!",
    "def f(x):\n    return x ** 2\n", "[INST] Say it. [/INST]", "naïve café",
]  # fmt: skip
STYLES = ("first", "always", "never", "llama2", "gemma", "unigram")


def sentencepiece(style: str) -> dict[str, Any]:
    """A tokenizer.json with "▁" for the space, trained here. `style`: the scheme of its Metaspace, or as a Llama 2's, a
    Gemma's (byte tokens both, as those of the schemes), or a T5's (Unigram).
    """
    special = ["<unk>", "<s>", "</s>"]
    built = tokenizers.Tokenizer(models.Unigram() if style == "unigram" else models.BPE(unk_token="<unk>"))
    scheme = style if style in ("first", "always", "never") else "always"
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    if style == "unigram":
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=special, show_progress=False)
    built.train_from_iterator(SENTENCES, trainer)
    to_space: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "unigram":
        built.decoder = decoders.Metaspace(prepend_scheme="always")
    elif style == "gemma":
        built.normalizer = normalizers.Replace(" ", "▁")
        built.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        built.decoder = decoders.Sequence(to_space)
    elif style == "llama2":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        built.normalizer = normalizers.Sequence(steps)
        built.pre_tokenizer = None
        built.decoder = decoders.Sequence([*to_space, decoders.Strip(" ", 1, 0)])
    else:
        strip = [] if style == "never" else [decoders.Strip(" ", 1, 0)]
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        built.decoder = decoders.Sequence([*to_space, *strip])
    begin = [("<s>", 1)]
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=begin
    )
    content: dict[str, Any] = json.loads(built.to_str())
    if style != "unigram":
        vocab = content["model"]["vocab"]
        content["model"]["byte_fallback"] = True
        for byte in range(256):
            vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    # As Gemma has them: runs of blanks that are never cut, and no control tokens.
    size = max(len(content["model"]["vocab"]), built.get_vocab_size())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] += [
        {"id": size, "content": "▁▁▁", **plain},
        {"id": size + 1, "content": "<go>", **plain},
    ]
    return content


def speaking(style: str, template: str) -> Directory:
    """A directory with that tokenizer; its weights are too small for the vocabulary, for tests of text alone."""
    made = directory()
    made.files["tokenizer.json"] = sentencepiece(style)
    made.files["tokenizer_config.json"] = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    made.files["config.json"] |= {"vocab_size": 600, "bos_token_id": 1, "eos_token_id": 2}
    return made


def sharded() -> Directory:
    """The same in two files with an index."""
    whole = directory()
    del whole.files["model.safetensors"]
    names = list(_THEIRS.items())
    places: dict[str, str] = {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        whole.files[file] = safetensors(*safetensors_header(dict(part)))
        places |= {f"{theirs}.weight": file for _, theirs in part}
    whole.files["model.safetensors.index.json"] = {"metadata": {}, "weight_map": places}
    return whole


def use(path: Path) -> str:
    """Everything that a cluster does with a model, in short: the worker's part, then the frontend's.

    Returns "served", or the one line of a `ModelError` or of a request's refusal; raises for any other end.
    """
    try:
        fingerprint = model_fingerprint(str(path))
        model = load_model(str(path), dtype=torch.float32)
        assert model.fingerprint == fingerprint
        tokenizer = Tokenizer.load(str(path))
    except ModelError as error:
        line = str(error)
        assert line
        assert "\n" not in line
        assert len(line) < 700, len(line)
        return line
    engine = Engine(model, num_blocks=2, block_tokens=16, exact=True)
    try:
        ids = tokenizer.encode("ab 1\n b", add_special=True)
        ids += tokenizer.encode_chat([{"role": "user", "content": "ab"}])
    except (ChatTemplateError, TextNotEncoded) as error:
        return f"refused: {error}"
    assert all(0 <= each < model.config.vocab for each in ids), ids
    whole = tokenizer._files.without_control.encode("ab 1\n b", add_special_tokens=True).ids
    assert tokenizer.encode("ab 1\n b", add_special=True) == whole
    tokenizer.decode(range(model.config.vocab))
    if ids and len(ids) <= min(16, model.config.context_tokens_max):
        assert engine.prefill_chunk(ids, 0, engine.allocator.allocate(1), want_logits=True) is not None
    return "served"
