"""`halfmoon policy`: the change is an event, in force for every conductor and in replay."""

from __future__ import annotations

import asyncio
import sys

import orjson
import pytest
from conductor_scripts import MS, S
from live_conductors import CLUSTER, client, conductor, log_of, reach, say
from msgspec import structs

from halfmoon.bus.tasks import end_tasks
from halfmoon.cli.operator import policy as policy_command
from halfmoon.cli.operator.policy import changed, conductor_status
from halfmoon.cli.options import OptionInvalid
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.live.shell import Shell, run
from halfmoon.schemas import subjects
from halfmoon.schemas.events import PolicyChanged
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.status import ConductorStatus, StatusRequest
from tests.eventually import BOUND_S, within

QUIET = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S)


async def halfmoon(url: str, *words: str) -> tuple[int, str, str]:
    """Exit status and output of `halfmoon policy`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "halfmoon.cli.main", "policy", *words, "--nats", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_change_is_an_event_for_all_conductors_and_for_replay(nats_url: str) -> None:
    async with client(nats_url) as bus, conductor(nats_url, "c1", QUIET), conductor(nats_url, "c2", QUIET):
        await say(bus, *CLUSTER)
        status, out, err = await halfmoon(
            nats_url, "set", "name=random", "seed=7", "ttft_slo_ns=1500ms", "--json"
        )
        assert (status, err) == (0, "")
        assert orjson.loads(out)["ttft_slo_ns"] == 1500 * MS
        log = await log_of(bus)
        assert isinstance(log[-1].event, PolicyChanged)
        new = log[-1].event.policy
        assert (new.name, new.seed, new.ttft_slo_ns, new.lost_after_ns) == ("random", 7, 1500 * MS, 400 * S)
        core = Core()
        for stamped in log:
            core.step(stamped)
        for name in ("c1", "c2"):
            now = await reach(bus, log[-1].seq, name)
            assert (now.policy, now.digest) == (new, core.digest())
        status, out, _ = await halfmoon(nats_url, "show")
        shown = dict(line.split() for line in out.splitlines())
        assert (status, shown["name"], shown["ttft_slo_ns"], shown["lost_after_ns"]) == (
            0,
            "random",
            "1500ms",
            "400s",
        )
        status, out, err = await halfmoon(nats_url, "set", "seed=many")
        assert (status, out) == (1, "")
        assert err == "halfmoon: policy set seed=many: Expected a whole number\n"


async def test_without_a_conductor_it_says_so(nats_url: str) -> None:
    assert await halfmoon(nats_url, "show") == (1, "", "halfmoon: no conductor answers\n")


async def test_a_conductor_that_is_still_reading_the_log_is_not_believed(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, answered = asyncio.Event(), asyncio.Event()
    follow, answer = Shell._follow, Shell._status

    async def held(shell: Shell) -> None:
        await go.wait()
        await follow(shell)

    def heard(shell: Shell, request: StatusRequest) -> ConductorStatus:
        answered.set()
        return answer(shell, request)

    monkeypatch.setattr(Shell, "_follow", held)
    monkeypatch.setattr(Shell, "_status", heard)
    begun = structs.replace(QUIET, name="random", seed=7)
    async with client(nats_url) as bus:
        reading = asyncio.create_task(run(bus, conductor_id="c1", policy=begun))
        monkeypatch.setattr(policy_command, "ANSWER_S", BOUND_S)
        monkeypatch.setattr(policy_command, "READING_S", BOUND_S)
        everyone = subjects.status(subjects.CONDUCTORS)
        early = await bus.request(
            everyone, StatusRequest(), ConductorStatus, timeout_s=BOUND_S, await_responder=True
        )
        assert not early.caught_up
        answered.clear()
        asked = asyncio.create_task(conductor_status(bus))
        await within(answered.wait(), "it answers before it has read the log")
        monkeypatch.setattr(policy_command, "READING_S", 0)
        with pytest.raises(OptionInvalid, match="conductor c1 is still reading the log, at event 0"):
            await conductor_status(bus)
        go.set()
        assert (await asked).policy == begun
        await end_tasks([reading])


@pytest.mark.pure
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("speed=3", "policy set speed: there is no such key; the keys are name, seed, "),
        ("seed", "policy set seed: not of the form KEY=VALUE"),
        ("name=best", "policy set name=best: none of halfmoon, mooncake, "),
        ("seed=-1", "policy set seed=-1: Expected a whole number"),
        ("seed=3s", "policy set seed=3s: Expected a whole number"),
        (
            "ttft_slo_ns=1.5s",
            "policy set ttft_slo_ns=1.5s: Expected a whole number, or one with ns, us, ms or s",
        ),
        ("placements_max=0", "policy set placements_max=0: Expected `int` >= 1"),
        ("digest_events=1", "policy set digest_events=1: Expected `int` >= 100"),
        ("heartbeat_ns=2s", "policy set heartbeat_ns: it is the processes' own"),
        (
            "lost_after_ns=1s",
            "policy set lost_after_ns: less than two heartbeats would lose healthy processes",
        ),
    ],
)
def test_what_is_wrong_is_named(change: str, problem: str) -> None:
    with pytest.raises(OptionInvalid) as refused:
        changed(Policy(), [change])
    assert str(refused.value).startswith(problem)
