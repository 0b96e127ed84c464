"""Short prompts pass longer ones that wait at the same prefill worker."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_scripts import MS, S, Script, arrived, decode, keys, prefill, prefilled

from halfmoon.conductor.core.booking import NEVER_PASSED
from halfmoon.schemas.decisions import LayerStage, StartPrefill
from halfmoon.schemas.events import FrontendJoined, RequestArrived

#: 1,000 tokens take 110 ms, 100 take 20.
LONG_MS = 110


def placed(script: Script, event: RequestArrived, after_ns: int = 0) -> StartPrefill:
    (order,) = [one for one in script.orders(event, after_ns) if isinstance(one, StartPrefill)]
    return order


def waiting(count: int, **policy: Any) -> tuple[Script, list[str]]:
    """One prefill worker with `count` long prompts, which came at once; and their orders."""
    fields = {"admission": "none", "passing_durations": 8, **policy}
    script = Script(prefill(), decode(), FrontendJoined(frontend_id="f1", incarnation="i1"), **fields)
    orders = [placed(script, arrived(f"long{number}")) for number in range(count)]
    assert [one.before for one in orders] == [""] * count
    return script, [one.order_id for one in orders]


def queue(script: Script) -> list[str]:
    duty = script.core.state.workers["p0"].prompts
    assert duty is not None
    return list(duty.orders)


def test_a_short_prompt_passes_the_long_ones_that_no_worker_prepares() -> None:
    script, long = waiting(NEVER_PASSED + 2)
    short = placed(script, arrived("short", 100))
    assert short.before == long[NEVER_PASSED]
    assert queue(script) == [*long[:NEVER_PASSED], short.order_id, *long[NEVER_PASSED:]]
    assert short.predicted.queue_ns == NEVER_PASSED * LONG_MS * MS
    ends = [script.core.state.orders[one].prefill.end_ns - script.now_ns for one in queue(script)]
    assert ends == [LONG_MS * place * MS for place in range(1, NEVER_PASSED + 1)] + [
        (NEVER_PASSED * LONG_MS + 20) * MS,
        ((NEVER_PASSED + 1) * LONG_MS + 20) * MS,
        ((NEVER_PASSED + 2) * LONG_MS + 20) * MS,
    ]
    for number, order_id in enumerate(long[:NEVER_PASSED]):
        script(prefilled(order_id, f"long{number}"), LONG_MS * MS)
    assert queue(script)[0] == short.order_id


def test_the_first_of_a_queue_are_never_passed() -> None:
    script, long = waiting(NEVER_PASSED)
    assert placed(script, arrived("short", 100)).before == ""
    assert queue(script)[:-1] == long


def test_a_prompt_passes_no_shorter_one_and_none_that_is_as_long() -> None:
    script, _ = waiting(NEVER_PASSED)
    placed(script, arrived("short", 100))
    assert placed(script, arrived("as short", 100)).before == ""
    assert placed(script, arrived("longer", 200)).before == ""


@pytest.mark.parametrize("late", [False, True])
def test_a_prompt_is_passed_by_those_that_come_within_some_durations_of_its_own(late: bool) -> None:
    script, long = waiting(NEVER_PASSED + 1)
    # The orders are by arrival and eight durations: 880 ms of the long one, 160 of the short.
    after_ns = (8 * (LONG_MS - 20) + (1 if late else -1)) * MS
    short = placed(script, arrived("short", 100), after_ns)
    assert short.before == ("" if late else long[NEVER_PASSED])


@pytest.mark.parametrize("admission", ["none", "late"])
def test_a_prompt_is_not_passed_beyond_its_objective(admission: str) -> None:
    # The last long one ends at 550 ms; with a short one before it, at 570.
    script, long = waiting(NEVER_PASSED + 1, admission=admission, ttft_slo_ns=560 * MS)
    short = placed(script, arrived("short", 100, ttft_slo_ns=10 * S))
    assert short.before == (long[NEVER_PASSED] if admission == "none" else "")


def test_a_prompt_passes_none_whose_blocks_it_counts_on() -> None:
    script, long = waiting(NEVER_PASSED + 1, coming_blocks=True)
    text = keys(10, seed=3)
    brings = placed(script, arrived("brings", block_keys=text))
    counts = placed(script, arrived("counts on them", block_keys=text))
    assert (counts.local_blocks, counts.before) == (9, "")
    assert queue(script) == [*long, brings.order_id, counts.order_id]


def test_a_prompt_of_several_workers_is_not_passed() -> None:
    script, long = waiting(NEVER_PASSED + 2)
    script.core.state.orders[long[-1]].prefill.stages = [
        LayerStage(worker_id="p0", first_layer=0, layers=1, addresses=[])
    ]
    assert placed(script, arrived("short", 100)).before == ""


@pytest.mark.parametrize("policy", [{"passing_durations": 0}, {"name": "mooncake"}])
def test_older_logs_and_other_policies_compute_prompts_as_they_come(policy: dict[str, Any]) -> None:
    script, long = waiting(NEVER_PASSED + 1, **policy)
    assert placed(script, arrived("short", 100)).before == ""
    assert queue(script)[:-1] == long
