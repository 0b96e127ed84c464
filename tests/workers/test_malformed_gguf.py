"""GGUF files that are wrong, each in one place: one line says which file, and which field or tensor."""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmoon.workers.model.loading.files import ModelError, load_config, model_fingerprint
from halfmoon.workers.model.loading.gguf_header import BLOCKS
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.workers.made_models import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    TOKENS,
    U32,
    U64,
    Gguf,
    Tensor,
    gguf,
    use,
)

Change = Callable[[Gguf], Any]


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def put(name: str, kind: int, value: Any) -> Change:
    return lambda made: made.fields.__setitem__(name, (kind, value))


def drop(name: str) -> Change:
    return lambda made: made.fields.pop(name)


def tensor(name: str, **changes: Any) -> Change:
    def change(made: Gguf) -> None:
        found = next(each for each in made.tensors if each.name == name)
        for attribute, value in changes.items():
            setattr(found, attribute, value)

    return change


def attribute(name: str, value: Any) -> Change:
    return lambda made: setattr(made, name, value)


def tokens(**changes: Any) -> Change:
    """The list of tokens, with `i3="x"` in place of the third."""
    names: list[Any] = list(TOKENS)
    for place, name in changes.items():
        names[int(place[1:])] = name
    return put("tokenizer.ggml.tokens", ARRAY, (STRING, names))


NAN, INF = float("nan"), float("inf")
HEAD, WIDTH = "llama.attention.head_count", "llama.embedding_length"
EPS, BASE = "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"
FREQS = struct.pack("<2f", 1.0, 2.0)

CASES: dict[str, tuple[Change, str]] = {
    "magic": (attribute("magic", b"GGML"), "first four bytes"),
    "version 1": (attribute("version", 1), "GGUF version is 1"),
    "version of the other byte order": (attribute("version", 3 << 24), "GGUF version"),
    "tensors 2^63": (attribute("tensor_count", 1 << 63), "header counts 9223372036854775808 tensors"),
    "fields 2^63": (attribute("field_count", 1 << 63), "header counts 9223372036854775808 fields"),
    "one tensor too many": (attribute("tensor_count", 13), "tensor '' has 0 dimensions"),
    "one field too many": (attribute("field_count", 22), "of "),
    "array of 2^63": (put("a", ARRAY, struct.pack("<IQ", 4, 1 << 63)), "a counts 9223372036854775808 items"),
    "array of 2^40 texts": (put("a", ARRAY, struct.pack("<IQ", 8, 1 << 40)), "a counts"),
    "array beyond the end": (
        put("a", ARRAY, struct.pack("<IQ", 10, 1 << 20)),
        "a reaches beyond the file's end",
    ),
    "arrays in arrays": (
        put("a", ARRAY, struct.pack("<IQ", 9, 1) * 500 + struct.pack("<IQ", 4, 0)),
        "a is 'array of type 9'",
    ),
    "array of an unknown type": (put("a", ARRAY, struct.pack("<IQ", 77, 1)), "a is 'array of type 77'"),
    "field of an unknown type": (put("a", 13, b""), "a has type 13"),
    "text of 2^63": (
        put("a", STRING, struct.pack("<Q", 1 << 63)),
        "a has a text of 9223372036854775808 bytes",
    ),
    "text beyond the end": (put("a", STRING, struct.pack("<Q", 1 << 20)), "a reaches beyond the file's end"),
    "text that is no UTF-8": (
        put("general.name", STRING, struct.pack("<Q", 2) + b"\xff\xfe"),
        "general.name is no UTF-8",
    ),
    "name that is no UTF-8": (
        lambda made: made.extra.append((b"\xff", U32, 1)),
        "name of field 20 is no UTF-8",
    ),
    "name with lines": (lambda made: made.extra.append(("a\nb", 13, b"")), r"'a\nb' has type 13"),
    "field twice": (lambda made: made.extra.append((HEAD, U32, 2)), f"{HEAD} occurs twice"),
    "tensor twice": (
        lambda made: made.tensors.append(made.tensors[0]),
        "tensor token_embd.weight occurs twice",
    ),
    "alignment 0": (put("general.alignment", U32, 0), "general.alignment is 0"),
    "alignment 24": (put("general.alignment", U32, 24), "general.alignment is 24"),
    "alignment 2^31": (put("general.alignment", U32, 1 << 31), "general.alignment"),
    "alignment a text": (put("general.alignment", STRING, "x"), "general.alignment"),
    "no dimension": (tensor("output.weight", shape=()), "tensor output.weight has 0 dimensions"),
    "five dimensions": (
        tensor("output.weight", shape=(1, 1, 1, 16, 8)),
        "tensor output.weight has 5 dimensions",
    ),
    "a dimension of 0": (tensor("output.weight", shape=(0, 8)), "tensor output.weight: shape"),
    "a dimension of 2^63": (tensor("output.weight", shape=(1 << 63, 8)), "tensor output.weight: size"),
    "sizes whose product overflows": (
        tensor("output.weight", shape=(1 << 33, 1 << 31)),
        "tensor output.weight: size",
    ),
    "type 99": (tensor("output.weight", kind=99), "tensor output.weight: type is 99"),
    "type -1": (tensor("output.weight", kind=0xFFFFFFFF), "tensor output.weight: type"),
    "type of integers": (tensor("output.weight", kind=26), "tensor output.weight: type is 26"),
    "rows that are no blocks": (tensor("output.weight", kind=2), "tensor output.weight: shape"),
    "offset outside": (tensor("blk.0.ffn_down.weight", offset=1 << 40), "tensor blk.0.ffn_down.weight: size"),
    "offset 2^64 - 32": (
        tensor("blk.0.ffn_down.weight", offset=2**64 - 32),
        "tensor blk.0.ffn_down.weight: size",
    ),
    "offset off the alignment": (tensor("output.weight", offset=7), "tensor output.weight: offset is 7"),
    "tensors that overlap": (tensor("output.weight", offset=32), ": offset overlaps tensor"),
    "shape of another model": (tensor("output.weight", shape=(8, 16)), "output.weight: shape is (8, 16)"),
    "heads 0": (put(HEAD, U32, 0), f"{HEAD} is 0"),
    "heads 2^32 - 1": (put(HEAD, U32, 2**32 - 1), HEAD),
    "more heads than the width": (put(HEAD, U32, 9), HEAD),
    "KV heads 0": (put("llama.attention.head_count_kv", U32, 0), "head_count_kv is 0"),
    "KV heads that divide nothing": (
        put("llama.attention.head_count_kv", U32, 3),
        "num_key_value_heads is 3",
    ),
    "heads a list": (put(HEAD, ARRAY, (U32, [2])), f"{HEAD} is [2]"),
    "heads a text": (put(HEAD, STRING, "2"), HEAD),
    "heads true": (put(HEAD, BOOL, True), HEAD),
    "heads 2.0": (put(HEAD, F32, 2.0), HEAD),
    "layers 0": (put("llama.block_count", U32, 0), "llama.block_count is 0"),
    "layers 2^63": (put("llama.block_count", U64, 1 << 63), "llama.block_count"),
    "a layer too many": (put("llama.block_count", U32, 2), "tensor blk.1"),
    "context 0": (put("llama.context_length", U32, 0), "llama.context_length"),
    "context -5": (put("llama.context_length", I32, -5), "llama.context_length is -5"),
    "context 2^62": (put("llama.context_length", U64, 1 << 62), "llama.context_length"),
    "width missing": (drop(WIDTH), f"{WIDTH} is missing"),
    "width odd": (put(WIDTH, U32, 7), "llama.rope.dimension_count"),
    "eps NaN": (put(EPS, F32, NAN), f"{EPS} is nan"),
    "eps missing": (drop(EPS), f"{EPS} is missing"),
    "rope base 0": (put(BASE, F32, 0.0), f"{BASE} is 0.0"),
    "rope base inf": (put(BASE, F32, INF), f"{BASE} is inf"),
    "rope base a text": (put(BASE, STRING, "10000"), BASE),
    "rope dimensions": (put("llama.rope.dimension_count", U32, 2), "llama.rope.dimension_count is 2"),
    "rope scaling unknown": (
        put("llama.rope.scaling.type", STRING, "yarn"),
        "llama.rope.scaling.type is 'yarn'",
    ),
    "rope scaling without factor": (
        put("llama.rope.scaling.type", STRING, "linear"),
        "llama.rope.scaling.factor is missing",
    ),
    "rope factors NaN": (
        lambda made: made.tensors.append(
            Tensor("rope_freqs.weight", (2,), content=struct.pack("<2f", 1, NAN))
        ),
        "rope_freqs.weight holds a value",
    ),
    "rope factors of another length": (
        lambda made: made.tensors.append(Tensor("rope_freqs.weight", (4,), content=FREQS * 2)),
        "rope_freqs.weight has 4 values",
    ),
    "rope factors in rows": (
        lambda made: made.tensors.append(Tensor("rope_freqs.weight", (1, 2), content=FREQS)),
        "rope_freqs.weight",
    ),
    "experts": (put("llama.expert_count", U32, 8), "llama.expert_count is 8"),
    "architecture unknown": (put("general.architecture", STRING, "mamba"), "general.architecture is 'mamba'"),
    "architecture a list": (put("general.architecture", ARRAY, (U32, [1])), "general.architecture is [1]"),
    "architecture missing": (drop("general.architecture"), "general.architecture is None"),
    "weights of NaN": (
        tensor("output.weight", content=struct.pack("<f", NAN) * 128),
        "tensor output.weight holds values",
    ),
    "vocabulary of another size": (put("llama.vocab_size", U32, 15), "shape"),
    "vocabulary missing": (
        lambda made: (made.fields.pop("llama.vocab_size"), made.fields.pop("tokenizer.ggml.tokens")),
        "tokenizer.ggml.tokens is missing",
    ),
    "tokenizer missing": (drop("tokenizer.ggml.model"), "tokenizer.ggml.model is missing"),
    "tokenizer unknown": (put("tokenizer.ggml.model", STRING, "llama"), "tokenizer.ggml.model is 'llama'"),
    "pre-tokenizer unknown": (put("tokenizer.ggml.pre", STRING, "x"), "tokenizer.ggml.pre is 'x'"),
    "pre-tokenizer a number": (put("tokenizer.ggml.pre", U32, 5), "tokenizer.ggml.pre is 5"),
    "tokens missing": (drop("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is missing"),
    "tokens numbers": (put("tokenizer.ggml.tokens", ARRAY, (U32, [1])), "tokenizer.ggml.tokens is [1]"),
    "tokens a text": (put("tokenizer.ggml.tokens", STRING, "abc"), "tokenizer.ggml.tokens is 'abc'"),
    "a token twice": (tokens(i3="a"), "tokenizer.ggml.tokens has 'a' twice"),
    "a control token that is empty": (tokens(i1=""), "tokenizer.ggml.tokens has an empty control token"),
    "a token that a merge needs": (tokens(i6="x"), "tokenizer.ggml.merges is refused"),
    "merges missing": (drop("tokenizer.ggml.merges"), "tokenizer.ggml.merges is missing"),
    "a merge of one": (
        put("tokenizer.ggml.merges", ARRAY, (STRING, ["ab"])),
        "tokenizer.ggml.merges has item 0",
    ),
    "a merge of nothing": (
        put("tokenizer.ggml.merges", ARRAY, (STRING, ["a b", " "])),
        "tokenizer.ggml.merges has item 1",
    ),
    "merges numbers": (put("tokenizer.ggml.merges", ARRAY, (U32, [1])), "tokenizer.ggml.merges is [1]"),
    "token types too few": (
        put("tokenizer.ggml.token_type", ARRAY, (I32, [3])),
        "tokenizer.ggml.token_type is [3]",
    ),
    "token types a number": (put("tokenizer.ggml.token_type", U32, 3), "tokenizer.ggml.token_type is 3"),
    "end token outside": (put("tokenizer.ggml.eos_token_id", U32, 16), "tokenizer.ggml.eos_token_id is 16"),
    "end token -1": (put("tokenizer.ggml.eos_token_id", I32, -1), "tokenizer.ggml.eos_token_id is -1"),
    "end token a text": (put("tokenizer.ggml.eos_token_id", STRING, "0"), "tokenizer.ggml.eos_token_id"),
    "begin token outside": (
        put("tokenizer.ggml.bos_token_id", U32, 2**32 - 1),
        "tokenizer.ggml.bos_token_id",
    ),
    "template a number": (put("tokenizer.chat_template", U32, 5), "tokenizer.chat_template is 5"),
    "template broken": (put("tokenizer.chat_template", STRING, "{% if %}"), "chat_template is no template"),
    "template endless": (
        put(
            "tokenizer.chat_template",
            STRING,
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        ),
        "chat_template is refused",
    ),
    "template too long": (
        put("tokenizer.chat_template", STRING, "a" * 200_000),
        "tokenizer.chat_template has 200000",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_file_is_refused_by_the_name_of_its_field(name: str, tmp_path: Path) -> None:
    change, words = CASES[name]
    made = gguf()
    change(made)
    path = tmp_path / "m.gguf"
    path.write_bytes(made.encoded())
    line = use(path)
    assert line.startswith(f"{path}: "), line
    assert words in line


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_file_is_served_before_anything_is_broken(architecture: str, tmp_path: Path) -> None:
    made = gguf(architecture)
    if architecture == "qwen2":
        made.tensors += [
            Tensor(f"blk.0.attn_{letter}.bias", (rows,), content=bytes(4 * rows))
            for letter, rows in (("q", 8), ("k", 4), ("v", 4))
        ]
    path = tmp_path / "m.gguf"
    path.write_bytes(made.encoded())
    assert use(path) == "served"


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = gguf().encoded()
    path = tmp_path / "m.gguf"
    for size in range(0, len(whole) - 32, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError) as caught:
            model_fingerprint(str(path))
        assert str(caught.value).startswith(f"{path}: ")


def test_what_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.mkdir()
    assert "config.json" in use(path)
    path.rmdir()
    path.symlink_to(path)
    assert "no model" in use(path)
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    assert "no model" in use(path)
    path.unlink()
    os.mkfifo(path)
    assert "no model" in use(path)
    assert "no model" in use(tmp_path / ("x" * 300 + ".gguf")) or "too long" in use(tmp_path / ("x" * 300))
    assert "no model" in use(Path("~nobody-of-this-name/m.gguf"))
    path.unlink()
    path.touch()
    assert "size is below four bytes" in use(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf().encoded())
    path.chmod(0)
    assert use(path) == f"'{path}': Permission denied"


@pytest.mark.parametrize("where", ["behind the tensors", "a tensor", "a text", "an array"])
def test_a_sparse_file_of_100_gb_costs_neither_time_nor_memory(where: str, tmp_path: Path) -> None:
    made = gguf()
    size = 100 << 30
    if where == "a tensor":
        made.tensors[-1] = Tensor("blk.0.ffn_down.weight", (1 << 30, 16), content=b"")
    elif where == "a text":
        made.fields["a"] = STRING, struct.pack("<Q", 50 << 30)
    elif where == "an array":
        made.fields["a"] = ARRAY, struct.pack("<IQ", U64, 6 << 30)
    path = tmp_path / "m.gguf"
    path.write_bytes(made.encoded())
    os.truncate(path, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert use(path).startswith(f"{path}: ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_the_table_of_types_is_the_librarys() -> None:
    import gguf as library
    from gguf.quants import _type_traits

    known = {int(kind) for kind in _type_traits} | {0, 1}
    assert BLOCKS.keys() == known
    assert {kind: library.GGML_QUANT_SIZES[library.GGMLQuantizationType(kind)] for kind in known} == BLOCKS


def test_only_the_tokenizer_of_a_file_without_weights_is_read(tmp_path: Path) -> None:
    """The engine that computes nothing needs no weights."""
    made = gguf()
    made.tensors = []
    path = tmp_path / "m.gguf"
    path.write_bytes(made.encoded())
    assert load_config(str(path)).layers == 1
    assert Tokenizer.load(str(path)).decode([2, 3]) == "ab"
