"""Weights that are changed in place: no block of other weights is matched, whoever named it, whenever it was told."""

from __future__ import annotations

from conductor_scripts import MS, Script, arrived, decode, keys, pair, prefill, prefilled, stored

from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import Decision, StartDecode, StartPrefill
from halfmoon.schemas.events import FrontendJoined
from halfmoon.schemas.weights import PlacementsPaused, WeightsChanged
from halfmoon.workers.sketches import sketch_of

OLD, NEW = keys(10), keys(10, seed=2)


def halves(decisions: list[Decision]) -> tuple[StartPrefill, StartDecode]:
    first, then = decisions
    assert isinstance(first, StartPrefill)
    assert isinstance(then, StartDecode)
    return first, then


def warm() -> Script:
    """Its prefill worker's node has the blocks of every request, by the weights that were there first."""
    script = pair()
    script(stored("p0", OLD))
    first, _ = halves(script.orders(arrived("r0", block_keys=OLD)))
    assert first.local_blocks > 0
    return script


def test_keys_of_the_version_before_match_nothing_and_the_order_names_the_new_one() -> None:
    script = warm()
    assert script(WeightsChanged(weight_version="v2")) == []
    for half in halves(script.orders(arrived("r1", block_keys=OLD))):
        assert half.weight_version == "v2"
        assert getattr(half, "local_blocks", 0) == 0
    # Told late by a node whose engine has not heard of the change: no request of now has such a key.
    script(stored("p0", OLD))
    first, _ = halves(script.orders(arrived("r2", block_keys=NEW, weight_version="v2")))
    assert first.local_blocks == 0


def test_blocks_of_the_new_version_are_matched() -> None:
    script = warm()
    script(WeightsChanged(weight_version="v2"))
    script(stored("p0", NEW))
    first, _ = halves(script.orders(arrived("r1", block_keys=NEW, weight_version="v2")))
    assert first.local_blocks > 0


def test_a_request_that_waits_through_the_change_is_placed_as_one_that_nobody_has_computed() -> None:
    script = pair(arrival_wait_ns_max=10_000 * MS)
    script(stored("p0", OLD))
    script(PlacementsPaused())
    assert script.orders(arrived("r1", block_keys=OLD)) == []
    script(WeightsChanged(weight_version="v2"))
    first, then = halves(script.orders(PlacementsPaused(paused=False)))
    assert (first.local_blocks, first.weight_version, then.weight_version) == (0, "v2", "v2")


def test_what_is_coming_is_of_the_version_before_as_well() -> None:
    script = Script(
        prefill(),
        prefill(1),
        decode(),
        FrontendJoined(frontend_id="f1", incarnation="i1"),
        coming_blocks=True,
    )
    script(arrived("r0", block_keys=OLD))
    script(WeightsChanged(weight_version="v2"))
    assert script.core.state.coming.match(OLD) == {}


def test_an_order_that_runs_stays_of_its_version_and_what_it_computed_is_like_nothing() -> None:
    script = pair()
    first, _ = halves(script.orders(arrived("r0", block_keys=OLD, sketch=sketch_of(b"r" * 16, range(1_000)))))
    script(WeightsChanged(weight_version="v2"))
    assert script.core.state.orders[first.order_id].weight_version == ""
    script(prefilled(first.order_id, "r0", "p0"))
    assert script.core.state.similar.prompts == {}


def test_a_core_that_is_restored_has_the_version() -> None:
    script = warm()
    script(WeightsChanged(weight_version="v2"))
    assert Core.restore(script.core.snapshot()).state.weight_version == "v2"
