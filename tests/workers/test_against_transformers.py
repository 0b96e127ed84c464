"""The engine says what transformers says, for the real model and for tiny ones of every supported
architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import (
    generate,
    prefill,
    reference_greedy,
    reference_logits,
    reference_logprobs,
    reference_model,
)

from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import (
    LoadedModel,
    ModelNotFound,
    ModelUnsupported,
    load_model,
    model_fingerprint,
)
from halfmoon.workers.model.prompt_rows import PromptScores
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.lengths import sizes

STORY = "The lighthouse keeper counted 1,024 steps each night. In 1893 the lamp went out; nobody in the village spoke. "


@pytest.fixture(scope="module")
def reference(model_f32: LoadedModel) -> Any:
    return reference_model(model_f32)


@pytest.fixture(scope="module")
def engine(model_f32: LoadedModel) -> Engine:
    return Engine(model_f32, num_blocks=16, block_tokens=256, exact=True)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    questions = [
        "What is the capital of France?",
        "Write three lines of Python that sort a list.",
        "Is the sky blue?",
    ]
    chats = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]
    texts = ["Once upon a time, there was a", "1, 1, 2, 3, 5, 8, 13,"]
    story = tokenizer.encode(STORY * 60)
    return [
        *chats,
        *(tokenizer.encode(text) for text in texts),
        story[:255],
        story[:256],
        story[:257],
        story[:1500],
    ]


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_transformers(
    engine: Engine, reference: Any, tokenizer: Tokenizer
) -> None:
    for prompt in prompts(tokenizer):
        tokens = 24 if len(prompt) < 200 else 8
        assert generate(engine, prompt, tokens) == reference_greedy(reference, prompt, tokens)


@pytest.mark.slow
@pytest.mark.slow  # test_same_text.py compares with what transformers said, without its import
@pytest.mark.parametrize("those", sizes(slice(2, 5), slice(5, 8)), ids=["short", "around a block"])
def test_logits_are_those_of_transformers(
    engine: Engine, reference: Any, tokenizer: Tokenizer, those: slice
) -> None:
    for prompt in prompts(tokenizer)[those]:
        table = engine.allocator.allocate(2)
        difference = (prefill(engine, prompt, table) - reference_logits(reference, prompt)).abs().max()
        engine.allocator.free(table)
        assert difference < 1e-3


@pytest.mark.parametrize("exact", sizes(True, False))
def test_log_probabilities_of_a_prompt_are_those_of_transformers(
    model_f32: LoadedModel, reference: Any, tokenizer: Tokenizer, exact: bool
) -> None:
    engine = Engine(model_f32, num_blocks=4, block_tokens=32, exact=exact)
    prompt = prompts(tokenizer)[0] + tokenizer.encode(STORY)
    scores = PromptScores(prompt, top=3)
    table = engine.allocator.allocate(4)
    for start in range(0, len(prompt), 32):
        engine.prefill_chunk(prompt[start : start + 32], start, table, scores=scores)
    expected = reference_logprobs(reference, prompt)
    own = expected[range(len(expected)), prompt[1:]]
    likely = expected.topk(3)
    found = torch.tensor([row.logprob for row in scores.rows])
    assert len(prompt) > 64
    assert (found - own).abs().max() < 1e-3
    # Two of nearly the same probability may change places.
    bounds = own[None, :, None] + torch.tensor([1e-3, -1e-3])[:, None, None]
    ranks = (expected[None] > bounds).sum(-1) + 1
    for row, low, high in zip(scores.rows, *ranks.tolist(), strict=True):
        assert low <= row.rank <= high
    tops = torch.tensor([[logprob for _, logprob in row.top_logprobs] for row in scores.rows])
    assert (tops - likely.values).abs().max() < 1e-3
    for row, logprobs in zip(scores.rows, expected, strict=True):
        for token, logprob in row.top_logprobs:
            assert abs(float(logprobs[token]) - logprob) < 1e-3


def tiny(kind: str, folder: Path, **options: Any) -> Any:
    """A random model of three layers, saved as a Hugging Face directory."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.3, **options,
    }  # fmt: skip
    torch.manual_seed(5)
    names = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}
    config = getattr(transformers, names[kind] + "Config")(**sizes)
    model = getattr(transformers, names[kind] + "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()  # a bias of zeros would hide one that is not added
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=options.get("shard", "1GB"))
    return model


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
        ("llama", {"rope_parameters": LINEAR}),
        ("llama", {"head_dim": 32, "num_key_value_heads": 4}),
        ("mistral", {"sliding_window": None, "head_dim": 32}),
    ],
)
def test_a_tiny_model_equals_transformers(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = tiny(kind, tmp_path, **options)
    model = load_model(str(tmp_path), dtype=torch.float32)
    assert model.config.tied == bool(options.get("tie_word_embeddings", False))
    prompt = [(7 * i * i + 3) % 300 for i in range(203)]
    engine = Engine(model, num_blocks=16, block_tokens=16, exact=True)
    table = engine.allocator.allocate(13)
    torch.testing.assert_close(
        prefill(engine, prompt, table), reference_logits(reference, prompt), atol=2e-4, rtol=1e-4
    )
    engine.allocator.free(table)
    assert generate(engine, prompt, 12) == reference_greedy(reference, prompt, 12)
    assert model.fingerprint == model_fingerprint(str(tmp_path))


def test_a_sharded_model_loads_as_a_whole_one(tmp_path: Path) -> None:
    reference = tiny("llama", tmp_path, shard="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = load_model(str(tmp_path), dtype=torch.float32)
    engine = Engine(model, num_blocks=4, block_tokens=16, exact=True)
    assert generate(engine, [5, 6, 7], 9) == reference_greedy(reference, [5, 6, 7], 9)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ModelNotFound, match="model-00002"):
        load_model(str(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        ("mistral", {"sliding_window": 128}, "sliding_window"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    kind: str, options: dict[str, Any], field: str, tmp_path: Path
) -> None:
    tiny(kind, tmp_path, **options)
    with pytest.raises(ModelUnsupported, match=field):
        load_model(str(tmp_path), dtype=torch.float32)


def test_another_weight_is_another_fingerprint(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path)
    before = model_fingerprint(str(tmp_path))
    assert before == model_fingerprint(str(tmp_path))
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(tmp_path)
    assert model_fingerprint(str(tmp_path)) != before
