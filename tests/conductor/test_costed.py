"""A costed request: each part of what a decision looks at is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conductor_scripts import Script, arrived, decode, prefill, worker

from halfmoon.conductor.core.placement import costed as module
from halfmoon.conductor.core.placement.costed import Costed, cost_request
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.schemas.decisions import RejectRequest, StartPrefill
from halfmoon.schemas.events import FrontendJoined, PrefillFailed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was computed, in order."""
    found: list[str] = []

    def counted(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            found.append(name)
            return whole(*args, **options)

        return count

    names = (
        "match_prefix", "candidates", "decode_candidates", "mixed_candidates", "least_mixed", "prefills_to_choose_from",
    )  # fmt: skip
    for name in names:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return found


def cluster(**policy: Any) -> Script:
    mixed = worker("m0", "mixed", token_budget=216)
    members = (prefill(0), prefill(1), decode(0), decode(1), mixed)
    return Script(*members, FrontendJoined(frontend_id="f1", incarnation="i1"), **policy)


def cost(script: Script, **fields: Any) -> Costed:
    return cost_request(script.core.state, arrived(**fields), script.now_ns, "draw")


def test_a_decision_between_a_pair_and_a_mixed_worker_matches_and_costs_once(calls: list[str]) -> None:
    script = cluster()
    script(arrived("r1"))
    assert calls == ["match_prefix", "prefills_to_choose_from", "least_mixed"]


def test_a_request_that_is_placed_again_is_matched_and_costed_once(calls: list[str]) -> None:
    script = cluster(mixed_choice="never")
    order = next(one for one in script(arrived("r1")) if isinstance(one, StartPrefill))
    calls.clear()
    failed = PrefillFailed(
        order_id=order.order_id,
        request_id="r1",
        worker_id=order.worker_id,
        reason="it failed",
        retryable=True,
    )
    assert any(isinstance(one, StartPrefill) for one in script(failed))
    assert calls == ["match_prefix", "candidates", "decode_candidates"]


def test_an_explanation_costs_what_the_short_cuts_left_out_and_no_more(calls: list[str]) -> None:
    script = cluster(mixed_choice="never")
    script.core.explain_requests = explain_all
    script(arrived("r1"))
    (why,) = script.core.notes
    assert [c.worker_id for c in why.prefill] == ["p0", "p1"]
    assert [c.worker_id for c in why.decode] == ["d0", "d1"]
    assert [calls.count(name) for name in ("match_prefix", "candidates", "decode_candidates")] == [1, 1, 1]


def test_the_candidates_of_a_choice_become_all_when_they_are_asked_for() -> None:
    known = cost(cluster())
    assert (len(known.prefills), known.prefill_workers, len(known.decodes)) == (1, 2, 1)
    assert [c.worker_id for c in known.every_prefill()] == ["p0", "p1"]
    assert [c.worker_id for c in known.every_decode()] == ["d0", "d1"]
    assert known.every_decode() is known.every_decode()
    assert known.tbt_ns_max >= max(c.tbt_ns for c in known.decodes)


def test_the_batch_of_a_time_is_made_once_and_each_time_has_its_own() -> None:
    script = cluster(mixed_choice="never")
    script(arrived("r1"))
    known, state = cost(script, request_id="r2"), script.core.state
    (order,) = state.orders.values()
    decoding = state.workers[order.decode_id]
    then = order.prefill.end_ns
    assert known.load_at(decoding, then) is known.load_at(decoding, then)
    assert known.load_at(decoding, then).sequences == 1
    assert known.load_at(decoding, then - 1).sequences == 0


def test_what_no_worker_could_hold_is_refused_by_the_same_value() -> None:
    script = cluster(mixed_choice="never")
    (refusal,) = script.orders(arrived("r1", tokens=200_000))
    assert isinstance(refusal, RejectRequest)
    known = cost(script, request_id="r2", tokens=200_000)
    assert (refusal.reason, known.every_prefill(), known.every_decode()) == ("too_long", [], [])
