"""A worker that is told to take another role: nothing new is placed there, what it has goes on, no role dies out."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_scripts import Script, arrived, decode, finished, prefill, prefilled, worker

from halfmoon.schemas.decisions import ChangeRole, StartDecode, StartPrefill
from halfmoon.schemas.events import FrontendJoined, RoleWanted, WorkerDraining, WorkerLeft

EITHER = ["prefill", "decode"]


def elastic(**fields: Any) -> Script:
    """Two of each worker; all may become the other."""
    script = Script()
    for number in (0, 1):
        script(prefill(number, may_become=EITHER, **fields))
        script(decode(number, may_become=EITHER, **fields))
    script(FrontendJoined(frontend_id="f1", incarnation="i1"))
    return script


def places(script: Script, request_id: str) -> tuple[str, str]:
    start, then = script.orders(arrived(request_id))
    assert isinstance(start, StartPrefill)
    assert isinstance(then, StartDecode)
    return start.worker_id, then.worker_id


def test_nothing_is_placed_on_a_worker_that_changes_and_it_is_placed_on_in_its_new_role() -> None:
    script = elastic()
    assert script(RoleWanted(target_id="p1", role="decode")) == [ChangeRole(worker_id="p1", role="decode")]
    assert {places(script, f"r{number}")[0] for number in range(4)} == {"p0"}
    script(WorkerDraining(worker_id="p1", incarnation="i1"))
    script(WorkerLeft(worker_id="p1", incarnation="i1", reason="becomes a decode worker"))
    script(worker("p1", "decode", incarnation="i2", may_become=EITHER))
    known = script.core.state.workers["p1"]
    assert (known.role, known.change.becomes, known.draining) == ("decode", "", False)
    assert "p1" in {places(script, f"s{number}")[1] for number in range(6)}


def test_what_a_worker_has_when_it_is_told_to_change_ends_there() -> None:
    script = elastic()
    start, then = script.orders(arrived("r1"))
    assert isinstance(start, StartPrefill)
    assert isinstance(then, StartDecode)
    script(RoleWanted(target_id=start.worker_id, role="decode"))
    script(prefilled(start.order_id, "r1", start.worker_id))
    script(finished(start.order_id, "r1", then.worker_id))
    assert script.core.state.requests == {}


@pytest.mark.parametrize(
    ("worker_id", "role"),
    [("p1", "prefill"), ("p1", "attention"), ("zz", "decode")],
    ids=["its own", "one that it may not have", "nobody's"],
)
def test_a_role_that_cannot_be_taken_is_passed_over(worker_id: str, role: Any) -> None:
    script = elastic()
    assert script(RoleWanted(target_id=worker_id, role=role)) == []
    assert not any(known.draining for known in script.core.state.workers.values())


def test_a_worker_that_was_started_for_one_role_keeps_it() -> None:
    script = elastic()
    script(prefill(2))
    assert script(RoleWanted(target_id="p2", role="decode")) == []


def test_the_last_of_a_role_keeps_it() -> None:
    """Also while the other one is on its way out."""
    script = elastic()
    assert script(RoleWanted(target_id="d0", role="prefill")) != []
    assert script(RoleWanted(target_id="d1", role="prefill")) == []
    assert script(RoleWanted(target_id="d0", role="prefill")) == [], "it was told already"
    script(WorkerDraining(worker_id="p0", incarnation="i1"))
    assert script(RoleWanted(target_id="p1", role="decode")) == []


def test_a_worker_that_joins_once_more_still_changes() -> None:
    script = elastic()
    script(RoleWanted(target_id="p1", role="decode"))
    script(prefill(1, may_become=EITHER))
    known = script.core.state.workers["p1"]
    assert (known.draining, known.change.becomes) == (True, "decode")


def test_a_process_that_is_started_again_has_forgotten_it() -> None:
    script = elastic()
    script(RoleWanted(target_id="p1", role="decode"))
    script(prefill(1, incarnation="i2", may_become=EITHER))
    known = script.core.state.workers["p1"]
    assert (known.role, known.draining, known.change.becomes) == ("prefill", False, "")


def test_a_worker_that_changes_takes_nothing_whatever_it_says_of_draining() -> None:
    """Else it would have orders for as long as there is load, and never change."""
    script = elastic()
    script(RoleWanted(target_id="p1", role="decode"))
    script(WorkerDraining(worker_id="p1", incarnation="i1", draining=False))
    assert {places(script, f"r{number}")[0] for number in range(4)} == {"p0"}
