"""Hugging Face directories that are wrong, each in one place: one line says which file, and which field or tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.made_models import (
    TOKENS,
    Directory,
    directory,
    safetensors,
    safetensors_header,
    sharded,
    use,
)

Change = Callable[[Directory], Any]
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
NAN, INF = float("nan"), float("inf")
NORM = "model.norm.weight"
DEEP = 100_000


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def put(file: str, *names: Any, to: Any) -> Change:
    """Sets one value in a file's JSON, at any depth."""

    def change(made: Directory) -> None:
        inner = made.files[file]
        for name in names[:-1]:
            inner = inner[name]
        inner[names[-1]] = to

    return change


def drop(file: str, *names: Any) -> Change:
    def change(made: Directory) -> None:
        inner = made.files[file]
        for name in names[:-1]:
            inner = inner[name]
        del inner[names[-1]]

    return change


def config(name: str, value: Any) -> Change:
    return put(CONFIG, name, to=value)


def whole(file: str, content: Any) -> Change:
    return lambda made: made.files.__setitem__(file, content)


def without(file: str) -> Change:
    return lambda made: made.files.pop(file)


def rope(**changes: Any) -> Change:
    return lambda made: made.files[CONFIG]["rope_scaling"].update(changes)


def header(name: str, **changes: Any) -> Change:
    """Changes what the safetensors header says of one tensor."""

    def change(made: Directory) -> None:
        entries, contents = safetensors_header()
        entries[name].update(changes)
        made.files[WEIGHTS] = safetensors(entries, contents)

    return change


def raw_header(raw: bytes) -> Change:
    return whole(WEIGHTS, safetensors(raw, safetensors_header()[1]))


def regex(pattern: str) -> Change:
    return put(TOKENIZER, "pre_tokenizer", "pretokenizers", 0, "pattern", to={"Regex": pattern})


def nan_weights(made: Directory) -> None:
    entries, contents = safetensors_header()
    begin, end = entries[NORM]["data_offsets"]
    made.files[WEIGHTS] = safetensors(
        entries, contents[:begin] + struct.pack("<f", INF) * ((end - begin) // 4) + contents[end:]
    )


CASES: dict[str, tuple[Change, str, str]] = {
    "config missing": (without(CONFIG), "", "holds no config.json"),
    "config empty": (whole(CONFIG, b""), CONFIG, "content is no JSON"),
    "config no JSON": (whole(CONFIG, b"{"), CONFIG, "content is no JSON"),
    "config a list": (whole(CONFIG, []), CONFIG, "content is []"),
    "config binary": (whole(CONFIG, b"\xff\xfe\x00"), CONFIG, "content is no UTF-8 at byte 0"),
    "config too deep": (whole(CONFIG, "[" * DEEP), CONFIG, "content is JSON that is nested too deep"),
    "config with a number of 5000 digits": (
        whole(CONFIG, '{"a": ' + "9" * 5000 + "}"),
        CONFIG,
        "content is no JSON",
    ),
    "model_type missing": (drop(CONFIG, "model_type"), CONFIG, "model_type is None"),
    "model_type a list": (config("model_type", ["llama"]), CONFIG, "model_type is ['llama']"),
    "hidden_size missing": (drop(CONFIG, "hidden_size"), CONFIG, "hidden_size is missing"),
    "hidden_size a text": (config("hidden_size", "8"), CONFIG, "hidden_size is '8'"),
    "hidden_size 2^63": (config("hidden_size", 1 << 63), CONFIG, "hidden_size is"),
    "heads 0": (config("num_attention_heads", 0), CONFIG, "num_attention_heads is 0"),
    "heads -2": (config("num_attention_heads", -2), CONFIG, "num_attention_heads is -2"),
    "heads null": (config("num_attention_heads", None), CONFIG, "num_attention_heads is missing"),
    "heads 1e400": (config("num_attention_heads", INF), CONFIG, "num_attention_heads is inf"),
    "KV heads 3": (config("num_key_value_heads", 3), CONFIG, "num_key_value_heads is 3"),
    "head_dim 3": (config("head_dim", 3), CONFIG, "head_dim is 3"),
    "head_dim a list": (config("head_dim", [4]), CONFIG, "head_dim is [4]"),
    "layers 10^9": (config("num_hidden_layers", 10**9), CONFIG, "num_hidden_layers is"),
    "layers 2": (config("num_hidden_layers", 2), "", "tensor model.layers.1"),
    "eps NaN": (config("rms_norm_eps", NAN), CONFIG, "rms_norm_eps is nan"),
    "eps null": (config("rms_norm_eps", None), CONFIG, "rms_norm_eps is missing"),
    "rope_theta 0": (config("rope_theta", 0), CONFIG, "rope_theta is 0"),
    "rope_theta 10^400": (config("rope_theta", 10**400), CONFIG, "rope_theta is"),
    "rope_scaling a list": (config("rope_scaling", [1]), CONFIG, "rope_scaling is [1]"),
    "rope_scaling a text": (config("rope_scaling", "linear"), CONFIG, "rope_scaling is 'linear'"),
    "rope type a list": (rope(rope_type=["llama3"]), CONFIG, "rope_scaling.rope_type is ['llama3']"),
    "rope factor 0": (rope(factor=0), CONFIG, "rope_scaling.factor is 0"),
    "rope factor NaN": (rope(factor=NAN), CONFIG, "rope_scaling.factor is nan"),
    "rope frequencies equal": (rope(high_freq_factor=1.0), CONFIG, "rope_scaling.high_freq_factor is 1.0"),
    "rope context missing": (
        drop(CONFIG, "rope_scaling", "original_max_position_embeddings"),
        CONFIG,
        "rope_scaling.original_max_position_embeddings is missing",
    ),
    "context 10^18": (config("max_position_embeddings", 10**18), CONFIG, "max_position_embeddings is"),
    "vocab_size 0": (config("vocab_size", 0), CONFIG, "vocab_size is 0"),
    "vocab_size 15": (config("vocab_size", 15), WEIGHTS, "shape is (16, 8)"),
    "tie_word_embeddings a text": (
        config("tie_word_embeddings", "no"),
        CONFIG,
        "tie_word_embeddings is 'no'",
    ),
    "eos_token_id a text": (config("eos_token_id", "</s>"), CONFIG, "eos_token_id is '</s>'"),
    "eos_token_id outside": (config("eos_token_id", [0, 16]), CONFIG, "eos_token_id is [0, 16]"),
    "hidden_act a number": (config("hidden_act", 5), CONFIG, "hidden_act is 5"),
    "quantized": (config("quantization_config", {"bits": 4}), CONFIG, "quantization_config is"),
    "generation broken": (whole(GENERATION, b"{"), GENERATION, "content is no JSON"),
    "generation a list": (whole(GENERATION, [1]), GENERATION, "content is [1]"),
    "generation's eos outside": (
        put(GENERATION, "eos_token_id", to=99),
        CONFIG,
        "generation_config.json: eos_token_id is 99",
    ),
    "weights missing": (without(WEIGHTS), "", "holds no *.safetensors"),
    "weights empty": (whole(WEIGHTS, b""), WEIGHTS, "header is no safetensors header"),
    "weights cut in the header": (
        whole(WEIGHTS, safetensors(*safetensors_header())[:50]),
        WEIGHTS,
        "header is no",
    ),
    "weights cut at the end": (
        whole(WEIGHTS, safetensors(*safetensors_header())[:-1]),
        WEIGHTS,
        "header is no",
    ),
    "weights with a tail": (
        whole(WEIGHTS, safetensors(*safetensors_header()) + b"x"),
        WEIGHTS,
        "header is no",
    ),
    "header of 2^63": (whole(WEIGHTS, struct.pack("<Q", 1 << 63) + b"{}"), WEIGHTS, "header is no"),
    "header of 0": (whole(WEIGHTS, struct.pack("<Q", 0)), WEIGHTS, "header is no"),
    "header no JSON": (raw_header(b"{" + b" " * 100), WEIGHTS, "header is no"),
    "header too deep": (raw_header(b'{"a":' * DEEP + b"}" * DEEP), WEIGHTS, "header is no"),
    "header a list": (raw_header(b"[]"), WEIGHTS, "header is no"),
    "header no UTF-8": (raw_header(b'{"\xff": 1}'), WEIGHTS, "header is no"),
    "offsets outside": (header(NORM, data_offsets=[0, 1 << 40]), WEIGHTS, "header is no"),
    "offsets backwards": (header(NORM, data_offsets=[64, 32]), WEIGHTS, "header is no"),
    "offsets of 2^64": (header(NORM, data_offsets=[1 << 64, 1 << 65]), WEIGHTS, "header is no"),
    "offsets negative": (header(NORM, data_offsets=[-32, 0]), WEIGHTS, "header is no"),
    "shape overflows": (header(NORM, shape=[1 << 33, 1 << 33]), WEIGHTS, "header is no"),
    "shape of another model": (header(NORM, shape=[2, 4]), WEIGHTS, f"{NORM}: shape is (2, 4)"),
    "dtype unknown": (header(NORM, dtype="F99"), WEIGHTS, "header is no"),
    "dtype of integers": (header(NORM, dtype="I32"), WEIGHTS, f"tensor {NORM}: dtype is 'I32'"),
    "a tensor missing": (
        lambda made: made.files.__setitem__(
            WEIGHTS, safetensors(*safetensors_header({"output_norm": "model.norm"}))
        ),
        "",
        "is None; supported: present",
    ),
    "weights of infinity": (nan_weights, WEIGHTS, f"tensor {NORM} holds values"),
    "tokenizer missing": (without(TOKENIZER), "", "holds no tokenizer.json"),
    "tokenizer empty": (whole(TOKENIZER, b""), TOKENIZER, "content is refused by the tokenizer"),
    "tokenizer binary": (whole(TOKENIZER, b"\x80"), TOKENIZER, "content is no UTF-8"),
    "tokenizer a list": (whole(TOKENIZER, []), TOKENIZER, "content is refused"),
    "tokenizer too deep": (whole(TOKENIZER, '{"a":' * DEEP + "}" * DEEP), TOKENIZER, "content is refused"),
    "tokenizer without a model": (drop(TOKENIZER, "model"), TOKENIZER, "content is refused"),
    "model unknown": (put(TOKENIZER, "model", "type", to="Abacus"), TOKENIZER, "content is refused"),
    "vocab empty": (put(TOKENIZER, "model", "vocab", to={}), TOKENIZER, "refused"),
    "vocab a list": (put(TOKENIZER, "model", "vocab", to=TOKENS), TOKENIZER, "content is refused"),
    "an id outside the model": (
        put(TOKENIZER, "model", "vocab", "h", to=4_000_000_000),
        TOKENIZER,
        "vocab gives 'h' the id 4000000000",
    ),
    "an id of -1": (put(TOKENIZER, "model", "vocab", "h", to=-1), TOKENIZER, "content is refused"),
    "a merge of one": (put(TOKENIZER, "model", "merges", to=["ab"]), TOKENIZER, "content is refused"),
    "a merge of unknown tokens": (
        put(TOKENIZER, "model", "merges", to=[["x", "y"]]),
        TOKENIZER,
        "content is refused",
    ),
    "merges numbers": (put(TOKENIZER, "model", "merges", to=[1]), TOKENIZER, "content is refused"),
    "an added token that is empty": (put(TOKENIZER, "added_tokens", 0, "content", to=""), TOKENIZER, ""),
    "an added token outside the model": (
        put(TOKENIZER, "added_tokens", 0, "content", to="<new>"),
        TOKENIZER,
        "vocab gives '<new>' the id",
    ),
    "added tokens a number": (put(TOKENIZER, "added_tokens", to=5), TOKENIZER, "content is refused"),
    "regex broken": (regex("("), TOKENIZER, "content is refused"),
    "regex exponential": (regex(r"(a+)+$"), TOKENIZER, "Regex '(a+)+$'"),
    "regex exponential in a letter of its own": (regex(r"(?:z|zz)+$"), TOKENIZER, "Regex"),
    "regex of the fourth power": (regex(r"(\w*\w*\w*\w*)$"), TOKENIZER, "Regex"),
    "regex too long": (regex("a" * 5000), TOKENIZER, "Regex has 5000 characters"),
    "settings broken": (whole(SETTINGS, b"{]"), SETTINGS, "content is no JSON"),
    "settings a text": (whole(SETTINGS, b'"x"'), SETTINGS, "content is 'x'"),
    "template a number": (put(SETTINGS, "chat_template", to=5), SETTINGS, "chat_template is 5"),
    "template an object": (put(SETTINGS, "chat_template", to={}), SETTINGS, "chat_template is {}"),
    "default template a number": (
        put(SETTINGS, "chat_template", to=[{"name": "default", "template": 5}]),
        SETTINGS,
        "chat_template is 5",
    ),
    "template broken": (put(SETTINGS, "chat_template", to="{{"), SETTINGS, "chat_template is no template"),
    "template too long": (
        put(SETTINGS, "chat_template", to="a" * 200_000),
        SETTINGS,
        "chat_template has 200000",
    ),
    "template file broken": (
        lambda made: made.files.update({SETTINGS: {}, "chat_template.jinja": "{% for %}"}),
        "chat_template.jinja",
        "chat_template is no template",
    ),
    "template file binary": (
        lambda made: made.files.update({SETTINGS: {}, "chat_template.jinja": b"\xff"}),
        "chat_template.jinja",
        "content is no UTF-8",
    ),
    "eos_token a number": (put(SETTINGS, "eos_token", to=2), SETTINGS, "eos_token is 2"),
    "bos_token without content": (
        put(SETTINGS, "bos_token", to={"content": 5}),
        SETTINGS,
        "bos_token is {'content': 5}",
    ),
    "added_tokens_decoder a list": (
        put(SETTINGS, "added_tokens_decoder", to=[1]),
        SETTINGS,
        "added_tokens_decoder is [1]; it must be an object",
    ),
    "an added token without an id": (
        put(SETTINGS, "added_tokens_decoder", to={"x": {"content": "a"}}),
        SETTINGS,
        "added_tokens_decoder has the name 'x'; it must be a token id",
    ),
    "an added token a number": (
        put(SETTINGS, "added_tokens_decoder", to={"2": 5}),
        SETTINGS,
        "added_tokens_decoder.2 is 5; it must be an object",
    ),
    "an added token without content": (
        put(SETTINGS, "added_tokens_decoder", to={"2": {"special": True}}),
        SETTINGS,
        "added_tokens_decoder.2.content is missing",
    ),
    "an added token of another id": (
        put(SETTINGS, "added_tokens_decoder", to={"2": {"content": "b"}}),
        SETTINGS,
        "added_tokens_decoder.2 is 'b', which is 3 in tokenizer.json",
    ),
    "additional_special_tokens a text": (
        put(SETTINGS, "additional_special_tokens", to="a"),
        SETTINGS,
        "additional_special_tokens is 'a'; it must be a list of tokens",
    ),
    "mapped eos_token a number": (
        lambda made: made.files.update({"special_tokens_map.json": {"eos_token": 5}}),
        "special_tokens_map.json",
        "eos_token is 5; it must be a token",
    ),
}
#: What another reader might refuse, and what is served here.
SERVED = {
    "an added token that is empty",
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_directory_is_refused_by_the_name_of_file_and_field(name: str, tmp_path: Path) -> None:
    change, file, words = CASES[name]
    made = directory()
    change(made)
    folder = made.write(tmp_path / "m")
    line = use(folder)
    if name in SERVED:
        assert line == "served"
        return
    assert words in line
    assert str(folder / file if file else folder) in line


def test_the_directories_are_served_before_anything_is_broken(tmp_path: Path) -> None:
    assert use(directory().write(tmp_path / "whole")) == "served"
    assert use(sharded().write(tmp_path / "sharded")) == "served"


INDEXES: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "content is no JSON"),
    "a list": ([], "content is []"),
    "without a map": ({}, "weight_map is None"),
    "an empty map": ({"weight_map": {}}, "weight_map is {}"),
    "a map of numbers": ({"weight_map": {"a": 1}}, "weight_map: 'a' lies in 1"),
    "a missing file": ({"weight_map": {"a": "model-9.safetensors"}}, "holds no model-9.safetensors"),
    "the folder above": ({"weight_map": {"a": "../x.safetensors"}}, "lies in '../x.safetensors'"),
    "an absolute path": ({"weight_map": {"a": "/etc/passwd"}}, "lies in '/etc/passwd'"),
    "the folder": ({"weight_map": {"a": "."}}, "lies in '.'"),
    "another kind of file": ({"weight_map": {"a": "config.json"}}, "lies in 'config.json'"),
    "a NUL": ({"weight_map": {"a": "\0.safetensors"}}, "holds no"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_names_files_beside_it_or_is_refused(name: str, tmp_path: Path) -> None:
    content, words = INDEXES[name]
    made = sharded()
    made.files[INDEX] = content
    folder = made.write(tmp_path / "m")
    (tmp_path / "x.safetensors").write_bytes(b"")
    line = use(folder)
    assert words in line
    assert str(folder) in line


def test_two_files_that_hold_one_tensor_are_refused(tmp_path: Path) -> None:
    made = directory()
    made.files["another.safetensors"] = made.files["some.safetensors"] = made.files.pop(WEIGHTS)
    line = use(made.write(tmp_path / "m"))
    assert "is in another.safetensors too" in line


def test_beside_a_whole_file_others_are_not_read(tmp_path: Path) -> None:
    """Mistral's own form lies beside transformers' in its directories."""
    made = directory()
    header, contents = safetensors_header({"token_embd": "tok_embeddings"})
    made.files["consolidated.safetensors"] = safetensors(header, contents)
    assert use(made.write(tmp_path / "m")) == "served"


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "nothing"])
@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, TOKENIZER, SETTINGS, GENERATION, INDEX])
def test_what_stands_in_a_files_place_is_named(file: str, kind: str, tmp_path: Path) -> None:
    folder = directory().write(tmp_path / "m")
    place = folder / file
    place.unlink(missing_ok=True)
    match kind:
        case "folder":
            place.mkdir()
        case "fifo":
            os.mkfifo(place)
        case "loop":
            place.symlink_to(file)
        case _:
            place.symlink_to("nothing")
    line = use(folder)
    assert file in line
    assert str(folder) in line


def test_links_to_files_elsewhere_are_followed(tmp_path: Path) -> None:
    """Caches of models are folders of links."""
    folder = directory().write(tmp_path / "blobs")
    (tmp_path / "m").mkdir()
    for file in folder.iterdir():
        (tmp_path / "m" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert use(tmp_path / "m") == "served"


@pytest.mark.parametrize(
    "file", [CONFIG, WEIGHTS, TOKENIZER, SETTINGS, GENERATION, INDEX, "chat_template.jinja"]
)
def test_a_sparse_file_of_100_gb_is_refused_unread(file: str, tmp_path: Path) -> None:
    made = directory()
    del made.files[SETTINGS]["chat_template"]
    folder = made.write(tmp_path / "m")
    with (folder / file).open("ab") as opened:
        opened.truncate(100 << 30)
    line = use(folder)
    assert str(folder / file) in line


def test_a_config_with_a_name_twice_is_read_as_json_says(tmp_path: Path) -> None:
    """The last counts: the same for every reader of JSON that has no opinion."""
    made = directory()
    text = json.dumps(made.files[CONFIG])
    made.files[CONFIG] = text[:-1] + ', "hidden_size": 0}'
    assert "hidden_size is 0" in use(made.write(tmp_path / "m"))
