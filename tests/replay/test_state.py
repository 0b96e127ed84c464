"""The state at one place of the log, readable and as plain values."""

from __future__ import annotations

import msgspec
import pytest
from recorded import lines_of, saved

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.replay import state_text
from halfmoon.conductor.replay.logfile import EventLine
from halfmoon.conductor.replay.verify import Replay
from halfmoon.schemas.events import Stamped

SEQ = 450
#: Of a snapshot and its state, in this order: conductors of two releases compare digests. What changes it is a version.
VERSION = 11
FIELDS = (
    "seq at_ns clock_lead_ns orders_now timers_in_row code_version policy paused weight_version workers stores "
    "frontends index requests parked orders finished timers asked_ns leaving links ssd_links answers round_robin "
    "similar offered demand displaced counters"
)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    log = saved(tmp_path_factory.mktemp("state") / "log.jsonl", lines_of(5))
    replay = Replay(log, until=SEQ)
    for _ in replay:
        pass
    return replay.core


def test_replay_stops_after_the_event_that_was_named(core: Core) -> None:
    other = Core()
    for line in lines_of(5):
        if isinstance(line, EventLine) and line.seq <= SEQ:
            other.step(Stamped(seq=line.seq, at_ns=line.at_ns, event=line.event))
    assert core.digest() == other.digest()
    assert SEQ - 1 <= core.seq <= SEQ


def test_a_snapshot_has_the_fields_of_the_state_in_one_order_whatever_records_it_is_made_of() -> None:
    version, state = msgspec.msgpack.decode(Core().snapshot())
    assert (version, " ".join(state)) == (VERSION, FIELDS)


def test_the_text_names_every_process_request_order_and_timer(core: Core) -> None:
    state, text = core.state, state_text.described(core)
    assert state.requests
    assert state.orders
    words = text.split()
    for ids in (state.workers, state.stores, state.frontends, state.requests, state.orders, state.timers):
        assert [name for name in ids if name not in words] == []
    assert core.digest() in text
    assert f"{state.index.blocks} blocks in the index" in text
    policy = text.splitlines()[2]
    assert policy.startswith(f"policy: name={state.policy.name} ")
    assert f" admission={state.policy.admission} " in policy


def test_plain_values_hold_all_of_the_state(core: Core) -> None:
    plain = msgspec.json.decode(msgspec.json.encode(state_text.plain(core)))
    assert plain["digest"] == core.digest()
    assert set(plain) == {"digest", *core.state.__struct_fields__}
    assert list(plain["orders"]) == list(core.state.orders)
    dram, ssd = plain["index"]["dram"], plain["index"]["ssd"]
    for key in [*dram, *ssd]:
        assert sorted({*dram.get(key, []), *ssd.get(key, [])}) == core.state.index.holders(bytes.fromhex(key))
    assert len(plain["index"]["dram"]) + len(plain["index"]["ssd"]) == core.state.index.blocks
