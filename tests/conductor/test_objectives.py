"""An idle cluster serves what it can, and a prediction refuses only where something recent supports it."""

from __future__ import annotations

import pytest
from conductor_scripts import MS, S, Script, arrived, decode, finished, prefill, prefilled
from msgspec.structs import replace

from halfmoon.conductor.core.objectives import RECENT_NS
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import RejectRequest, StartDecode, StartPrefill
from halfmoon.schemas.events import RequestCancelled, WorkerHeartbeat

#: A prompt of 1,000 tokens takes 110 ms; so do a step with 100 ms + 10 ms a sequence.
STEPS = CostProfile(decode_base_ns=100 * MS, decode_per_sequence_ns=10 * MS)
#: No process is missed, however far the clock goes.
QUIET = {"heartbeat_ns": 10**12}


def cluster(*, idle_served: bool = True, **policy: int) -> Script:
    return Script(prefill(), decode(profile=STEPS), idle_served=idle_served, **QUIET, **policy)


def reason(script: Script, request_id: str, **fields: int) -> str:
    """ "" when it is placed, or the reason of its refusal."""
    first = script.orders(arrived(request_id, **fields))[0]
    assert isinstance(first, RejectRequest | StartPrefill)
    return first.reason if isinstance(first, RejectRequest) else ""


def serve(script: Script, request_id: str, compute_ns: int = 110 * MS, step_ns: int = 110 * MS) -> None:
    """A request from its arrival to its end, with what its prefill and its steps took."""
    started = next(d for d in script(arrived(request_id)) if isinstance(d, StartDecode))
    script(prefilled(started.order_id, request_id, compute_ns=compute_ns, prompt_tokens=1_000), 1 * MS)
    beat = WorkerHeartbeat(
        worker_id="d0", incarnation="i1", queued=0, running=1, kv_blocks_used=10, step_ns=step_ns, steps=9,
        step_sequences=1, step_context_tokens=1_000,
    )  # fmt: skip
    script(beat, 1 * MS)
    script(finished(started.order_id, request_id, decode_ns=100 * S), 1 * MS)


def test_what_fits_an_idle_cluster_is_served_however_slow() -> None:
    for policy in ({"ttft_slo_ns": 50 * MS}, {"tbt_slo_ns": 50 * MS}):
        assert reason(cluster(idle_served=False, **policy), "r1") in ("ttft_slo", "tbt_slo")
        script = cluster(**policy)
        assert reason(script, "r1") == ""
        serve(learned := cluster(**policy), "r1")
        assert reason(learned, "r2") == "", "also where the prediction is known to be right"


def test_a_queue_may_double_what_a_request_takes_alone_where_the_cluster_s_objective_is_less() -> None:
    script = cluster(ttft_slo_ns=50 * MS)
    serve(script, "r0")
    assert [reason(script, f"r{n}") for n in (1, 2, 3)] == ["", "", "ttft_slo"]
    script = cluster(tbt_slo_ns=50 * MS)
    serve(script, "r0")  # alone it takes 110 ms, with twelve 220 ms
    reasons = [reason(script, f"r{n}") for n in range(1, 20)]
    assert 10 <= reasons.index("tbt_slo") <= 15
    assert set(reasons) == {"", "tbt_slo"}


def test_priorities_scale_that_and_the_least_of_them_finds_an_idle_cluster_too() -> None:
    for priority, expected in ((-1_000, ["", "ttft_slo"]), (0, ["", ""]), (1_000, ["", ""])):
        script = cluster(ttft_slo_ns=50 * MS)
        serve(script, "r0")
        assert [reason(script, f"r{n}", priority=priority) for n in (1, 2)] == expected


@pytest.mark.parametrize("named", ["ttft_slo_ns", "tbt_slo_ns"])
def test_an_objective_that_a_request_names_refuses_it_only_by_what_was_seen(named: str) -> None:
    script = cluster()
    slo = {named: 50 * MS}
    assert reason(script, "probe", **slo) == "", "nothing was seen yet"
    assert reason(script, "other", **slo) == named[:-3], "while the worker is idle, so one at a time"
    script(RequestCancelled(request_id="probe"))
    serve(script, "r1")
    assert reason(script, "r2", **slo) == named[:-3]
    assert reason(script, "r3", **{named: 120 * MS}) == "", "which is enough"
    script(RequestCancelled(request_id="r3"))
    script.now_ns += RECENT_NS + 1 * S
    assert reason(script, "r4", **slo) == "", "what was seen long ago supports nothing"


def test_a_wrong_profile_is_corrected_by_what_it_made_wait() -> None:
    """The profile says ten times what is true, and the cluster's objective lies between."""
    wrong = replace(STEPS, prefill_base_ns=100 * MS, prefill_per_token_ps=1_000 * MS)
    script = Script(
        prefill(profile=wrong), decode(profile=STEPS), idle_served=True, ttft_slo_ns=500 * MS, **QUIET
    )
    for number in range(6):
        serve(script, f"r{number}")
    placed = next(d for d in script(arrived("last")) if isinstance(d, StartPrefill))
    assert 100 * MS < placed.predicted.ttft_ns < 130 * MS


def test_the_decode_worker_is_told_what_the_request_was_admitted_by() -> None:
    def told(script: Script, request_id: str, **fields: int) -> int:
        return next(d for d in script(arrived(request_id, **fields)) if isinstance(d, StartDecode)).tbt_slo_ns

    script = cluster(tbt_slo_ns=50 * MS)
    assert told(script, "probe", tbt_slo_ns=20 * MS) == 0, "whatever comes"
    script(RequestCancelled(request_id="probe"))
    serve(script, "r1")
    limit_ns = told(script, "r2")
    assert 210 * MS < limit_ns < 230 * MS, "twice what it takes alone"
    assert told(script, "r3", tbt_slo_ns=300 * MS) == 300 * MS
    assert told(cluster(idle_served=False), "r1") == 1 * S


def test_a_prefill_teaches_also_when_the_answer_ended_before_it_was_said() -> None:
    """An answer of one token: the decode worker has ended it when the prefill worker's word comes."""
    script = cluster()
    started = next(d for d in script(arrived("r1", max_tokens=1)) if isinstance(d, StartDecode))
    script(finished(started.order_id, "r1", completion_tokens=1), 1 * MS)
    before, counters = script.core.state.workers["p0"].cost, script.core.state.counters
    assert counters.prompt_tokens == 0
    said = prefilled(started.order_id, "r1", compute_ns=1 * S, prompt_tokens=1_000, cached_local_tokens=200)
    old = replace(said, prompt_tokens=0)  # an older log does not say how long the prompt was
    script(old)
    assert script.core.state.workers["p0"].cost == before
    script(said)
    assert script.core.state.workers["p0"].cost.prefill_ns(1_000, 200) > 2 * before.prefill_ns(1_000, 200)
    assert (counters.prompt_tokens, counters.cached_local_tokens) == (1_000, 200)
