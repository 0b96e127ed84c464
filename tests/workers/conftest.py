"""Makes `reference` importable here, and loads the model once for all tests of this folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(int(os.environ.get("HALFMOON_TEST_THREADS", "1")))

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


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)
