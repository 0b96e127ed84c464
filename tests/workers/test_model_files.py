"""The cache of dequantised weights, the reading of GGUF files, and errors that name what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.errors import ModelNotComputed
from halfmoon.workers.model.loading.files import (
    LoadedModel,
    ModelError,
    ModelNotFound,
    ModelUnsupported,
    find_model,
    load_config,
    load_model,
    model_fingerprint,
)
from halfmoon.workers.model.loading.gguf import GgufFile, unpermute_rotary
from halfmoon.workers.model.loading.weight_cache import cached_weights_path
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.lengths import sizes
from tests.workers.made_models import (
    F32,
    STRING,
    Directory,
    Gguf,
    Tensor,
    directory,
    safetensors,
    safetensors_header,
)
from tests.workers.made_models import gguf as made_gguf

MODEL = "smollm2-135m-instruct"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def tiny_gguf(path: Path, architecture: str = "llama") -> Path:
    """Two layers of random f32 weights; `token_embd` in f16."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(40)])
    writer.add_eos_token_id(3)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))

    writer.add_tensor("token_embd.weight", rng.standard_normal((40, 32)).astype(np.float16))
    add("output_norm.weight", 32)
    add("output.weight", 40, 32)
    shapes = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
              "ffn_norm": (32,), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}  # fmt: skip
    for i in range(2):
        for name, shape in shapes.items():
            add(f"blk.{i}.{name}.weight", *shape)
        if architecture == "qwen2":
            for name, size in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16)):
                add(f"blk.{i}.{name}.bias", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_that_changes_is_read_again(name: str, tmp_path: Path) -> None:
    """And one that stays is not."""
    made = directory()
    folder = str(made.write(tmp_path / "m"))
    first = load_config(folder)
    assert load_config(folder) is first
    file = tmp_path / "m" / name
    told = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(told | {"eos_token_id": [5, 6]}))
    assert {*load_config(folder).eos_token_ids} == {0, 5, 6}
    assert first.eos_token_ids == (0,)


def test_a_gguf_file_that_another_one_replaces_is_read_again(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    before = load_config(str(path))
    tiny_gguf(tmp_path / "other.gguf", "qwen2").replace(path)
    assert load_config(str(path)) != before


def test_the_second_load_reads_what_the_first_one_parsed(empty_cache: Path) -> None:
    path = str(tiny_gguf(empty_cache / "m.gguf"))
    first = load_model(path, dtype=torch.bfloat16)
    place = cached_weights_path(first.fingerprint, torch.bfloat16)
    assert place.is_file()
    before = place.stat().st_mtime_ns
    second = load_model(path, dtype=torch.bfloat16)
    assert place.stat().st_mtime_ns == before
    assert_equal(first, second)
    assert not list(place.parent.glob(".*")), "no temporary file is left"


def assert_equal(first: LoadedModel, second: LoadedModel) -> None:
    assert first.fingerprint == second.fingerprint
    assert first.weights.keys() == second.weights.keys()
    for name, weight in first.weights.items():
        assert weight.dtype == second.weights[name].dtype
        assert torch.equal(weight, second.weights[name]), name


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_cache_file_is_parsed_again(empty_cache: Path, damage: str) -> None:
    path = str(tiny_gguf(empty_cache / "m.gguf"))
    first = load_model(path, dtype=torch.float32)
    place = cached_weights_path(first.fingerprint, torch.float32)
    raw = bytearray(place.read_bytes())
    if damage == "flipped":
        raw[-5] ^= 1
    damaged = {"cut": raw[:-100], "flipped": raw, "empty": b""}[damage]
    place.unlink()
    place.write_bytes(damaged)
    assert_equal(load_model(path, dtype=torch.float32), first)
    assert_equal(load_model(path, dtype=torch.float32), first)
    assert place.read_bytes() != bytes(damaged)


def test_a_cache_folder_that_takes_no_files_costs_only_time(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny_gguf(empty_cache / "m.gguf"))
    expected = load_model(path, dtype=torch.float32)
    (empty_cache / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_cache / "file"))
    assert_equal(load_model(path, dtype=torch.float32), expected)


@pytest.mark.slow
@pytest.mark.realtime
def test_processes_that_start_at_once_parse_once(empty_cache: Path) -> None:
    path = tiny_gguf(empty_cache / "m.gguf")
    script = """
import fcntl, pathlib, sys, time, torch
from halfmoon.workers.model.loading import cache_files, files, weights
parse, lock = weights.parse_gguf, fcntl.flock
def coming(*arguments):
    print("comes", flush=True)
    return lock(*arguments)
cache_files.fcntl.flock = coming
def noted(*arguments):
    print("parsed", flush=True)
    while not pathlib.Path(sys.argv[2]).exists():
        time.sleep(0.01)
    return parse(*arguments)
weights.parse_gguf = noted
print("begins", flush=True)
print(files.load_model(sys.argv[1], dtype=torch.float32).fingerprint)
"""
    go = empty_cache / "go"
    command = [sys.executable, "-c", script, str(path), str(go)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    outputs = [process.stdout for process in running if process.stdout is not None]
    assert [output.readline() for output in outputs] == ["begins\n"] * 2
    assert [output.readline() for output in outputs] == ["comes\n"] * 2  # one parses; the other waits for it
    go.touch()
    answers = [output.read().split() for output in outputs]
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    assert sum(answer.count("parsed") for answer in answers) == 1
    assert {answer[-1] for answer in answers} == {model_fingerprint(str(path))}


@pytest.mark.parametrize("model", sizes("made here", MODEL))
def test_the_header_says_what_the_gguf_library_says(model: str, tmp_path: Path) -> None:
    path = find_model(MODEL).path if model == MODEL else tiny_gguf(tmp_path / "m.gguf")
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert {name: tensor.shape for name, tensor in ours.tensors.items()} == {
        tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in theirs.tensors
    }
    for name, value in ours.metadata.items():
        if not isinstance(value, list):
            assert theirs.fields[name].contents() == value
    for tensor in theirs.tensors[:3]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.tensor_f32(tensor.name), expected)
    ours.close()


def test_unpermuting_undoes_what_the_converter_does() -> None:
    weight = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    # As the converter of llama models writes it, for 2 heads of dimension 4.
    converted = weight.reshape(2, 2, 2, 3).swapaxes(1, 2).reshape(8, 3)
    assert not np.array_equal(converted, weight)
    assert np.array_equal(unpermute_rotary(converted, 2), weight)


def test_a_qwen2_gguf_keeps_its_rows_and_has_biases(empty_cache: Path) -> None:
    path = tiny_gguf(empty_cache / "q.gguf", "qwen2")
    model = load_model(str(path), dtype=torch.float32)
    file = GgufFile(path)
    assert np.array_equal(model.weights["layers.1.qkv"][:32].numpy(), file.tensor_f32("blk.1.attn_q.weight"))
    assert np.array_equal(
        model.weights["layers.1.qkv_bias"][32:48].numpy(), file.tensor_f32("blk.1.attn_k.bias")
    )
    assert model.config.attention_bias
    assert not model.config.tied


def row(size: int) -> bytes:
    return np.arange(1, size + 1, dtype=np.float32).tobytes()


def biased_gguf() -> Gguf:
    made = made_gguf("llama")
    sizes = {"attn_q": 8, "attn_k": 4, "attn_v": 4}
    made.tensors += [Tensor(f"blk.0.{name}.bias", (size,), content=row(size)) for name, size in sizes.items()]
    return made


def test_biases_of_a_llama_gguf_are_computed_with(empty_cache: Path) -> None:
    path = empty_cache / "m.gguf"
    path.write_bytes(biased_gguf().encoded())
    model = load_model(str(path), dtype=torch.float32)
    assert model.config.attention_bias
    # In the order of their rows: the converter pairs dimension 2i of a head with 2i + 1, and the engine i with i + 2.
    query, key, value = [1, 3, 2, 4, 5, 7, 6, 8], [1, 3, 2, 4], [1, 2, 3, 4]
    assert model.weights["layers.0.qkv_bias"].tolist() == [*query, *key, *value]
    plain = empty_cache / "p.gguf"
    plain.write_bytes(made_gguf("llama").encoded())
    assert first_logits(load_model(str(plain), dtype=torch.float32)) != first_logits(model)


def first_logits(model: LoadedModel) -> list[float]:
    engine = Engine(model, num_blocks=2, block_tokens=16, exact=True)
    rows = engine.prefill_chunk([2, 3], 0, engine.allocator.allocate(1), want_logits=True)
    assert rows is not None
    return [float(value) for value in torch.as_tensor(rows).flatten()]


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q_norm.weight", "blk.0.attn_output.bias", "blk.0.ffn_up.bias", "blk.1.attn_norm.weight", "output.bias",
     "rope_factors_long.weight"],
)  # fmt: skip
def test_a_gguf_tensor_that_nobody_computes_with_is_refused_by_name(name: str, empty_cache: Path) -> None:
    path = empty_cache / "m.gguf"
    made = biased_gguf()
    made.tensors.append(Tensor(name, (8,), content=row(8)))
    path.write_bytes(made.encoded())
    for use in (model_fingerprint, lambda path: load_model(path, dtype=torch.float32)):
        with pytest.raises(ModelNotComputed, match=f"tensor '{name}' is in the file, and the engine"):
            use(str(path))


@pytest.mark.parametrize("missing", ["attn_q", "attn_k", "attn_v"])
def test_a_gguf_that_has_some_of_its_biases_is_refused(missing: str, empty_cache: Path) -> None:
    path = empty_cache / "m.gguf"
    made = biased_gguf()
    made.tensors = [tensor for tensor in made.tensors if tensor.name != f"blk.0.{missing}.bias"]
    path.write_bytes(made.encoded())
    with pytest.raises(ModelError, match=r"tensor '?blk\.0\.attn_.\.bias"):
        load_model(str(path), dtype=torch.float32)


def with_tensors(names: dict[str, int], **config: object) -> Directory:
    """The directory with rows of these names and sizes more."""
    made = directory()
    header, contents = safetensors_header()
    for name, size in names.items():
        place = [len(contents), len(contents) + 4 * size]
        header[name] = {"dtype": "F32", "shape": [size], "data_offsets": place}
        contents += row(size)
    made.files["model.safetensors"] = safetensors(header, contents)
    made.files["config.json"] |= config
    return made


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.bias",
     "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.o_proj.bias",
     "model.layers.0.self_attn.q_proj.weight_scale"],
)  # fmt: skip
def test_a_tensor_of_a_directory_that_nobody_computes_with_is_refused_by_name(
    name: str, empty_cache: Path
) -> None:
    path = with_tensors({name: 8}).write(empty_cache / "made")
    for use in (model_fingerprint, lambda path: load_model(path, dtype=torch.float32)):
        with pytest.raises(ModelNotComputed, match=f"tensor '{name}' is in the file, and the engine"):
            use(str(path))


def test_tensors_that_say_what_the_configuration_says_are_left_out(empty_cache: Path) -> None:
    names = {"model.layers.0.self_attn.rotary_emb.inv_freq": 2, "model.rotary_emb.inv_freq": 2}
    path = with_tensors(names).write(empty_cache / "made")
    plain = directory().write(empty_cache / "plain")
    assert_same_weights(path, plain)
    tied = directory()
    tied.files["config.json"]["tie_word_embeddings"] = True
    assert load_model(str(tied.write(empty_cache / "tied")), dtype=torch.float32).config.tied
    made = made_gguf("llama")
    made.tensors.append(Tensor("rope_freqs.weight", (2,), content=row(2)))
    (empty_cache / "m.gguf").write_bytes(made.encoded())
    scaling = load_config(str(empty_cache / "m.gguf")).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factors) == ("factors", (1.0, 2.0))  # which the rotary embedding divides by


def assert_same_weights(first: Path, second: Path) -> None:
    models = [load_model(str(path), dtype=torch.float32).weights for path in (first, second)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"scaling.factor": 4.0}, 4.0),
        ({"scale_linear": 2.0}, 2.0),
        ({"scaling.factor": 1.0}, None),
        ({"scaling.type": "linear", "scaling.factor": 8.0}, 8.0),
        ({"scaling.type": "none", "scaling.factor": 8.0}, None),
    ],
)
def test_a_gguf_that_names_a_factor_alone_is_stretched_linearly(
    fields: dict[str, float | str], expected: float | None, empty_cache: Path
) -> None:
    made = made_gguf("llama")
    for name, value in fields.items():
        made.fields[f"llama.rope.{name}"] = (STRING if isinstance(value, str) else F32, value)
    (empty_cache / "m.gguf").write_bytes(made.encoded())
    scaling = load_config(str(empty_cache / "m.gguf")).rope_scaling
    assert (scaling and (scaling.kind, scaling.factor)) == (expected and ("linear", expected))


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 8192}, ""),
        ({"model_type": "mistral", "max_position_embeddings": 4096}, ""),
        ({"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 64}, ""),
        ({"model_type": "mistral", "max_position_embeddings": 4097}, r"sliding_window is 'left out \(4096\)'"),
        ({"model_type": "mistral", "sliding_window": 63}, "sliding_window is 63"),
        ({"model_type": "mistral", "sliding_window": "4096"}, "sliding_window is '4096'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 1.0}, ""),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, r"rope_parameters\.partial_rotary_factor is"),
    ],
)  # fmt: skip
def test_a_part_of_attention_that_is_not_computed_is_refused(
    config: dict[str, object], refused: str, empty_cache: Path
) -> None:
    made = directory()
    made.files["config.json"] |= config
    path = str(made.write(empty_cache / "made"))
    if not refused:
        assert load_config(path).layers == 1
        return
    with pytest.raises(ModelUnsupported, match=rf"config\.json: {refused}"):
        load_config(path)


def test_factors_beside_another_scaling_are_refused(empty_cache: Path) -> None:
    made = made_gguf("llama")
    made.tensors.append(Tensor("rope_freqs.weight", (2,), content=row(2)))
    made.fields["llama.rope.scaling.type"] = (STRING, "yarn")
    (empty_cache / "m.gguf").write_bytes(made.encoded())
    with pytest.raises(ModelUnsupported, match=r"llama\.rope\.scaling\.type is 'yarn'"):
        load_config(str(empty_cache / "m.gguf"))


def test_config_and_fingerprint_need_no_torch() -> None:
    script = f"""
import sys
from halfmoon.workers.model.loading.files import load_config, model_fingerprint
from halfmoon.workers.model.text.tokenizer import Tokenizer
load_config({MODEL!r}); Tokenizer.load({MODEL!r})
import halfmoon.workers.model.null_engine, halfmoon.workers.cost_fit
assert "torch" not in sys.modules
print(model_fingerprint({MODEL!r}))
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == model_fingerprint(MODEL)


def test_the_built_in_model_is_what_it_should_be(model_f32: LoadedModel) -> None:
    config = load_config(MODEL)
    assert config == model_f32.config
    assert model_f32.fingerprint == model_fingerprint(MODEL)
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (
        30,
        576,
        9,
        3,
        64,
    )
    assert (config.tied, config.context_tokens_max, config.eos_token_ids) == (True, 8192, (2,))
    assert (config.layers, config.kv_heads, config.head_dim) == (30, 3, 64)


def test_what_is_missing_or_broken_is_named(empty_cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model 'nothing-of-this-name'"):
        find_model("nothing-of-this-name")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        find_model(str(empty_cache))
    broken = empty_cache / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(ModelError, match="header"):
        load_config(str(broken))
    broken.write_bytes(b"no such thing")
    with pytest.raises(ModelError, match="not GGUF"):
        load_config(str(broken))
    whole = tiny_gguf(empty_cache / "m.gguf").read_bytes()
    broken.write_bytes(whole[: len(whole) - 1000])
    with pytest.raises(ModelError, match="size"):
        load_model(str(broken), dtype=torch.float32)
    with pytest.raises(ModelUnsupported, match="gptj"):
        load_config(str(tiny_gguf(empty_cache / "g.gguf", "gptj")))
    with pytest.raises(ModelUnsupported, match="pre"):
        Tokenizer.load(str(_with_pre(empty_cache)))


def _with_pre(folder: Path) -> Path:
    """A file whose pre-tokenizer nobody knows."""
    path = tiny_gguf(folder / "pre.gguf")
    writer = gguf.GGUFWriter(str(folder / "pre2.gguf"), "llama")
    for name, value in GgufFile(path).metadata.items():
        if name.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("something-else")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_tensor("token_embd.weight", np.zeros((40, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "pre2.gguf"
