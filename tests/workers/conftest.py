"""Makes `reference` importable here, and loads the model once for all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(int(os.environ.get("HALFMOON_TEST_THREADS", "1")))

from halfmoon.workers.model.kernels import tiles  # noqa: E402
from halfmoon.workers.model.loading.files import LoadedModel, load_model  # noqa: E402
from halfmoon.workers.model.text.tokenizer import Tokenizer  # noqa: E402
from tests.store.memory_channels import memory_is_reached  # noqa: E402

__all__ = ["memory_is_reached"]

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model_f32() -> LoadedModel:
    return load_model(MODEL, dtype=torch.float32)


@pytest.fixture(scope="session")
def model_bf16() -> LoadedModel:
    return load_model(MODEL, dtype=torch.bfloat16)


@pytest.fixture(params=["f32", "bf16", "bf16 in pairs", "f16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Of what a compiled kernel multiplies, in each form."""
    in_pairs = request.param == "bf16 in pairs"
    if in_pairs and not tiles.has_pairs():
        pytest.skip("the CPU has no instruction for pairs of bf16")
    monkeypatch.setattr(tiles, "multiplies_pairs", lambda: in_pairs)
    return {"f32": torch.float32, "f16": torch.float16}.get(request.param, torch.bfloat16)


@pytest.fixture
def threads() -> Iterator[None]:
    """PyTorch's number of them, which a test may change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)
