"""A preloaded model: whoever finds it computes the same bits with the same memory, and is disturbed by nobody else."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
import torch

from halfmoon.cli import model as models
from halfmoon.cli.processes import worker
from halfmoon.workers.model import preloaded as module
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading import files
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.preloaded import preload, preloaded
from tests.lengths import sizes

PROMPT = [(i * 31) % 4999 for i in range(40)]


@pytest.fixture
def kept(model_f32: LoadedModel) -> Iterator[LoadedModel]:
    preload(model_f32, [False, True])
    yield model_f32
    module._preloaded.clear()


def logits(engine: Engine) -> torch.Tensor:
    blocks = engine.allocator.allocate(1)
    result = engine.prefill_chunk(PROMPT, 0, blocks, want_logits=True)
    assert result is not None
    step = engine.decode([7], [len(PROMPT)], [blocks])
    engine.allocator.free(blocks)
    return torch.cat([result, step[0]])


def engine_of(model: LoadedModel, num_blocks: int, **fields: object) -> Engine:
    return Engine(model, num_blocks=num_blocks, block_tokens=64, exact=True, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("query_first", sizes(True, False))
def test_engines_of_any_size_share_its_weights_and_give_its_bits(
    kept: LoadedModel, query_first: bool
) -> None:
    alone = logits(engine_of(kept, 4, query_first=query_first))
    found = preloaded(kept.fingerprint, kept.dtype, query_first=query_first)
    assert found is not None
    model, transformer = found
    engines = [
        engine_of(model, blocks, query_first=query_first, transformer=transformer) for blocks in (4, 9)
    ]
    assert [torch.equal(logits(each), alone) for each in engines] == [True, True]
    assert engines[0].transformer.layers is engines[1].transformer.layers
    assert [each.transformer.rotary.positions for each in engines] == [256, 576]
    assert model.weights == {}


def test_a_worker_that_has_a_preloaded_model_reads_none(
    kept: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a forked worker makes its engine by."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("it reads the model's file")

    parser = argparse.ArgumentParser()
    worker.add(parser)
    threads = ["--threads", f"{torch.get_num_threads()}"]
    args = parser.parse_args(["--node", "n", "--id", "w", "--dtype", "float32", *threads])
    layout = models.layout_of(args)
    alone = logits(models.build_engine(args, layout, kv_blocks=2))
    monkeypatch.setattr(files, "load_model", refused)
    assert torch.equal(logits(models.build_engine(args, layout, kv_blocks=2)), alone)
    module._preloaded.clear()
    with pytest.raises(AssertionError, match="it reads"):
        models.build_engine(args, layout, kv_blocks=2)


def test_another_model_or_another_dtype_is_not_found(kept: LoadedModel) -> None:
    assert preloaded("0" * 32, kept.dtype, query_first=False) is None
    assert preloaded(kept.fingerprint, torch.bfloat16, query_first=False) is None
