"""`HalfmoonConnector` over classes that stand for vLLM's: what its half in vLLM's scheduler has the other half do.

`tests/vllm` has the same with real vLLMs.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch

pytestmark = pytest.mark.pure
BLOCK_TOKENS, TOKENS = 16, 70
WHOLE = [bytes([number]) for number in range(TOKENS // BLOCK_TOKENS)]
SENDS, NAMED = {"do_remote_decode": True}, {"do_remote_decode": True, "halfmoon_order": "o"}
LOADS = {"do_remote_prefill": True, "halfmoon_order": "o", "halfmoon_worker": "w"}


@pytest.fixture
def adapter() -> Iterator[ModuleType]:
    with fake_vllm.installed("halfmoon.store.adapters.vllm_connector") as module:
        yield module


def config(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "kv_transfer_config": SimpleNamespace(kv_connector_extra_config={"node": "n", "worker": "me"}),
        "cache_config": SimpleNamespace(block_size=BLOCK_TOKENS), "model_config": SimpleNamespace(model="m"),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0, world_size=1),
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changes})


def request(name: str, params: dict[str, Any]) -> Any:
    return SimpleNamespace(
        request_id=name, kv_transfer_params=params, num_prompt_tokens=TOKENS, block_hashes=WHOLE
    )


class Scheduler:
    """What vLLM's scheduler tells its connector. Each request has blocks 10, 11, ..."""

    def __init__(self, adapter: ModuleType) -> None:
        self.connector = adapter.HalfmoonConnector(config(), None, None)
        self.known: set[str] = set()

    def begin(self, one: Any, external: int = 0) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: ([*range(10, 20)],))
        self.connector.update_state_after_alloc(one, blocks, external)

    def step(self, **tokens: tuple[int, int]) -> Any:
        """By request: how many tokens were computed before, and are by this step."""
        new = [name for name in tokens if name not in self.known]
        old = [name for name in tokens if name in self.known]
        self.known |= tokens.keys()
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=tokens[name][0]) for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old, num_computed_tokens=[tokens[name][0] for name in old]
            ),
            num_scheduled_tokens={name: more for name, (_, more) in tokens.items()},
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda name: ([*range(10, 20)],)),
        )
        return self.connector.build_connector_meta(output)

    def part(self, **tokens: tuple[int, int]) -> Any:
        """Of the one prompt that the step sends: the first block, the engine's blocks, and whether it is at its end."""
        (part,) = self.step(**tokens).sends
        return part.first_block, list(part.block_ids), part.last


def test_blocks_go_once_they_are_whole_and_the_last_one_with_the_prompts_end(adapter: ModuleType) -> None:
    vllm, one = Scheduler(adapter), request("a", SENDS)
    vllm.begin(one)
    (first,) = vllm.step(a=(16, 4)).sends  # the first block was in the engine's prefix cache
    assert (first.first_block, list(first.block_ids), first.last) == (0, [10], False)
    assert (first.sent.tokens, first.sent.blocks, first.sent.keys) == (TOKENS, 5, WHOLE)
    assert vllm.step(a=(20, 5)).sends == []
    assert vllm.part(a=(25, 25)) == (1, [11, 12], False)
    # It was preempted, and is computed again from the beginning: what has gone does not go again.
    assert vllm.step(a=(0, 48)).sends == []
    assert vllm.part(a=(48, 22)) == (3, [13, 14], True)
    assert vllm.step(a=(70, 1)).sends == []
    freed_later, params = vllm.connector.request_finished(one, [])
    assert not freed_later
    assert params == {
        **LOADS,
        "do_remote_decode": False,
        "halfmoon_order": first.order_id,
        "halfmoon_worker": "me",
    }
    assert vllm.step().dropped == []


def test_a_prompt_that_is_not_computed_to_its_end_is_dropped(adapter: ModuleType) -> None:
    vllm = Scheduler(adapter)
    cut, waiting, other = (
        request("a", NAMED),
        request("b", {**NAMED, "halfmoon_order": "p"}),
        request("c", {}),
    )
    vllm.begin(cut)
    vllm.step(a=(0, 40))
    for one in (cut, waiting, other):
        assert vllm.connector.request_finished(one, []) == (False, None)
    assert vllm.step().dropped == ["o", "p"]


def test_a_name_is_one_prompts_and_what_is_no_name_names_nothing(adapter: ModuleType) -> None:
    vllm, first, second = Scheduler(adapter), request("a", NAMED), request("b", NAMED)
    vllm.begin(first)
    vllm.begin(second)
    assert [part.order_id for part in vllm.step(a=(0, 70), b=(0, 70)).sends] == ["o"]
    assert vllm.connector.request_finished(second, []) == (False, None)
    assert vllm.step().dropped == []
    for wrong in ("", "a b", "x" * 65, 5, ["o"], {"o": 1}, None):
        odd = request(f"odd {wrong}", {**NAMED, "halfmoon_order": wrong})
        vllm.begin(odd)
        (part,) = vllm.step(**{odd.request_id: (0, 16)}).sends
        assert adapter.NAME.fullmatch(part.order_id)
        for key in ("halfmoon_order", "halfmoon_worker"):
            asks = request("c", {**LOADS, key: wrong})
            assert vllm.connector.get_num_new_matched_tokens(asks, 0) == (0, False)


def test_what_an_engine_lacks_of_a_prompt_is_asked_for_once(adapter: ModuleType) -> None:
    vllm, one = Scheduler(adapter), request("a", LOADS)
    assert vllm.connector.get_num_new_matched_tokens(request("b", {}), 0) == (0, False)
    assert vllm.connector.get_num_new_matched_tokens(one, 32) == (38, True)
    assert vllm.connector.get_num_new_matched_tokens(one, 32) == (38, True)  # there was no room for it
    vllm.begin(one, 38)
    vllm.begin(one)
    (load,) = vllm.step().loads
    assert load == ("a", "o", "w", TOKENS, 2, [12, 13, 14])
    # It did not come.
    assert vllm.connector.get_num_new_matched_tokens(one, 0) == (0, False)
    assert vllm.step().loads == []
    assert vllm.connector.request_finished(one, []) == (False, None)
    assert vllm.step().aborted == ["a"]


def test_kv_is_laid_out_alike_where_all_is_equal_that_bytes_depend_on(adapter: ModuleType) -> None:
    cache = torch.zeros(4, 2, 16, 8)

    def fields(changed: Any = None, version: str = "1", **caches: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = adapter.fields_of(changed or config(), caches or {"layer": cache}, version)
        return found

    alike = fields()
    assert fields(layer=torch.zeros(9, 2, 16, 8)) == alike  # an engine may have more blocks
    ranks = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, rank=1, world_size=2)
    others = [
        fields(config(model_config=SimpleNamespace(model="other"))),
        fields(config(cache_config=SimpleNamespace(block_size=32))),
        fields(config(parallel_config=ranks)),
        fields(version="2"),
        fields(layer=cache.to(torch.bfloat16)),
        fields(layer=torch.zeros(4, 2, 8, 16)),
        fields(first=cache, second=cache),
    ]
    assert alike not in others
    with pytest.raises(ValueError, match="KV of layer: its blocks do not lie one behind the other"):
        adapter.rows_of("layer", cache.transpose(0, 1))
