"""What if: the recorded arrivals and costs in a simulated cluster, under the recorded policy and another."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from recorded import HEADER, saved, simulated_log, status_of

from halfmoon.conductor.replay.logfile import DecisionLine, EventLine, LogFile
from halfmoon.conductor.replay.verify import Replay, verify
from halfmoon.conductor.replay.whatif import NothingToSimulate, Recorded, compare, described, recorded
from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.profiles import load_profile
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival, read_trace
from halfmoon.schemas.decisions import MoveKv, StartDecode
from halfmoon.schemas.events import WorkerJoined
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.similar import NamedDocument
from tests.conductor.conductor_scripts import keys

GOLDEN = Path(__file__).parent / "golden"
TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "conversation_trace.jsonl.zst"
CLUSTER = ClusterShape(prefill=2, decode=2, pool_blocks=2_000)
POLICY = Policy(ttft_slo_ns=20_000_000_000, tbt_slo_ns=100_000_000)


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    return read_trace(TRACE)[:400]


def log_of(path: Path, cluster: ClusterShape, arrivals: list[Arrival], policy: Policy = POLICY) -> LogFile:
    simulated_log(path, cluster, arrivals, policy)
    return LogFile(path)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, arrivals: list[Arrival]) -> LogFile:
    return log_of(tmp_path_factory.mktemp("whatif") / "log.jsonl.zst", CLUSTER, arrivals)


@pytest.fixture(scope="module")
def run(log: LogFile) -> Recorded:
    return recorded(Replay(log))


def test_arrivals_cluster_and_costs_are_those_of_the_run(run: Recorded, arrivals: list[Arrival]) -> None:
    profile = load_profile("a800")
    assert (run.cluster.prefill, run.cluster.decode, run.cluster.block_tokens) == (2, 2, 512)
    assert (run.cluster.pool_blocks, run.cluster.decode_pool_blocks) == (2_000, 2_000)
    assert (run.profile.layers, run.profile.token_bytes) == (profile.layers, profile.token_bytes)
    learned, true = run.profile.cost, profile.cost
    assert learned.prefill_per_token_ps == pytest.approx(true.prefill_per_token_ps, rel=0.1)
    assert learned.decode_base_ns == pytest.approx(true.decode_base_ns, rel=0.1)
    start_ns = arrivals[0].at_ns
    assert [(a.at_ns + start_ns, a.prompt_tokens, a.block_keys, a.max_tokens) for a in run.arrivals] == [
        (a.at_ns, a.prompt_tokens, a.block_keys, max(a.max_tokens, a.output_tokens)) for a in arrivals
    ]
    for arrival, original in zip(run.arrivals, arrivals, strict=True):
        request = run.outcomes[f"r{run.arrivals.index(arrival)}"]
        assert request.end != "finished" or arrival.output_tokens == original.output_tokens


def test_what_may_stand_in_for_a_prompt_is_asked_for_again(tmp_path: Path) -> None:
    """A near-copy, and a prompt of documents: as the run had them."""
    names = [
        NamedDocument(name=bytes([place]) * 16, first_token=4_096 * place, tokens=4_096) for place in (0, 1)
    ]
    given = [
        Arrival(
            at_ns=(1 + 100 * place) * 1_000_000_000,
            prompt_tokens=8_193,
            output_tokens=2,
            block_keys=keys(16, place),
            sketch=bytes(range(256)) if place < 2 else b"",
            documents=names if place > 1 else [],
        )
        for place in range(4)
    ]
    policy = Policy(admission="none", ttft_slo_ns=1_000_000_000_000)
    run = recorded(Replay(log_of(tmp_path / "log.jsonl.zst", CLUSTER, given, policy)))
    assert [(one.sketch, one.documents) for one in run.arrivals] == [
        (one.sketch, one.documents) for one in given
    ]
    told = compare(run, policy)
    was, then = told.recorded.service.ttft_ms, told.simulated.service.ttft_ms
    off = compare(run, msgspec.structs.replace(policy, similar_tokens_min=0)).what_if.service.ttft_ms
    assert then.mean == pytest.approx(was.mean, rel=0.05)
    assert off.mean > 1.2 * was.mean


def test_the_record_is_told_as_the_simulation_told_it(
    run: Recorded, arrivals: list[Arrival], log: LogFile
) -> None:
    assert verify(log).identical
    told = simulate(arrivals, CLUSTER, POLICY, load_profile("a800"))
    was = compare(run, run.policy).recorded
    assert (was.endings.requests, was.endings.completed, was.endings.rejected) == (
        told.endings.requests,
        told.endings.completed,
        told.endings.rejected,
    )
    assert was.service.token_reuse == pytest.approx(told.service.token_reuse, rel=0.01)
    assert was.devices.prefill_gpu_s == pytest.approx(told.devices.prefill_gpu_s, rel=0.01)
    assert was.service.ttft_ms.p50 == pytest.approx(told.service.ttft_ms.p50, rel=0.01)
    assert was.service.tbt_ms == told.service.tbt_ms


def test_under_the_recorded_policy_the_simulation_is_near_the_record(run: Recorded) -> None:
    found = compare(run, run.policy)
    assert found.simulated.digest == found.what_if.digest
    assert found.simulated.endings.completed == pytest.approx(found.recorded.endings.completed, rel=0.05)
    assert found.simulated.service.ttft_ms.mean == pytest.approx(
        found.recorded.service.ttft_ms.mean, rel=0.15
    )
    assert found.simulated.service.tbt_ms.mean == pytest.approx(found.recorded.service.tbt_ms.mean, rel=0.1)
    assert found.simulated.service.token_reuse == pytest.approx(found.recorded.service.token_reuse, abs=0.02)


def test_another_policy_gives_another_run(run: Recorded) -> None:
    found = compare(run, msgspec.structs.replace(run.policy, name="random", admission="none"))
    assert found.what_if.endings.completed == len(run.arrivals)
    assert found.what_if.endings.rejected == {} != found.simulated.endings.rejected
    assert found.what_if.service.ttft_ms.mean > 1.5 * found.simulated.service.ttft_ms.mean
    text = described(found, "none.toml")
    assert "what if: none.toml" in text
    assert len([line for line in text.splitlines() if line.startswith("first token")]) == 4


def test_a_real_run_is_compared_and_its_losses_are_named() -> None:
    found = compare(recorded(Replay(LogFile(GOLDEN / "smollm2.jsonl.zst"))), Policy(admission="none"))
    assert found.recorded.endings.rejected["ttft_slo"] == 3
    assert found.what_if.endings.rejected == {}
    assert found.caveats[0].endswith("placements were lost and made again; simulated processes never die")
    assert 0.1 < found.simulated.service.ttft_ms.p50 / found.recorded.service.ttft_ms.p50 < 10


def test_a_run_without_kv_cannot_be_simulated() -> None:
    with pytest.raises(NothingToSimulate, match="no KVCache"):
        recorded(Replay(LogFile(GOLDEN / "null.jsonl.zst")))


NOT_SIMULATED = {
    "attention": "the run has 2 attention workers, which are not simulated here",
    "lending": "decode workers lent KV of {lent} requests to each other, which is not simulated here",
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_run_of_one_half_cannot_be_simulated(tmp_path: Path, log: LogFile, role: str) -> None:
    lines = [
        msgspec.structs.replace(line, event=msgspec.structs.replace(line.event, role=role))
        if isinstance(line, EventLine) and isinstance(line.event, WorkerJoined)
        else line
        for line in log.lines()
    ]
    half = saved(tmp_path / "half.jsonl.zst", lines, HEADER)
    with pytest.raises(NothingToSimulate, match="no worker that prefills, or none that decodes"):
        recorded(Replay(half))


#: Engines as `halfmoon adapt` reports them: mixed workers of one budget.
MIXED = ClusterShape(prefill=0, decode=0, mixed=4, pool_blocks=2_000, token_budget=2_048)
#: An iteration of a whole budget takes half a second.
MIXED_POLICY = Policy(ttft_slo_ns=20_000_000_000, tbt_slo_ns=1_000_000_000)


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory: pytest.TempPathFactory, arrivals: list[Arrival]) -> Recorded:
    path = tmp_path_factory.mktemp("mixed") / "log.jsonl.zst"
    return recorded(Replay(log_of(path, MIXED, arrivals, MIXED_POLICY)))


def test_a_run_of_mixed_workers_is_put_together_again(mixed_run: Recorded) -> None:
    profile = load_profile("a800")
    assert mixed_run.cluster == msgspec.structs.replace(
        MIXED,
        decode_pool_blocks=2_000,
        kv_blocks=profile.kv_bytes // profile.layout(512).block_bytes,
    )
    learned, true = mixed_run.profile.cost, profile.cost
    assert learned.prefill_per_token_ps == pytest.approx(true.prefill_per_token_ps, rel=0.1)
    assert learned.decode_base_ns == pytest.approx(true.decode_base_ns, rel=0.1)


def test_a_run_of_mixed_workers_is_simulated_near_its_record(
    mixed_run: Recorded, arrivals: list[Arrival]
) -> None:
    told = simulate(arrivals, MIXED, MIXED_POLICY, load_profile("a800"))
    found = compare(mixed_run, msgspec.structs.replace(mixed_run.policy, name="random"))
    was, now, other = found.recorded, found.simulated, found.what_if
    assert (was.setting.mixed, was.endings.completed) == (4, told.endings.completed)
    # A first token is drawn when the log hears of it, whatever shared the iterations of its prompt.
    assert was.service.ttft_ms == told.service.ttft_ms
    assert was.service.tbt_ms == told.service.tbt_ms
    assert now.endings.completed == pytest.approx(was.endings.completed, rel=0.05)
    assert now.service.ttft_ms.mean == pytest.approx(was.service.ttft_ms.mean, rel=0.15)
    assert now.service.tbt_ms.mean == pytest.approx(was.service.tbt_ms.mean, rel=0.15)
    assert now.service.token_reuse == pytest.approx(was.service.token_reuse, abs=0.02)
    assert other.digest != now.digest
    assert "4 mixed; SLO: first token 20 s" in described(found, "random.toml")


def borrowers(path: Path) -> set[str]:
    """Requests of which a log's decode workers held parts for each other."""
    decisions = [line.decision for line in LogFile(path).lines() if isinstance(line, DecisionLine)]
    placed = {each.request_id for each in decisions if isinstance(each, StartDecode) and each.loans}
    return placed | {each.request_id for each in decisions if isinstance(each, MoveKv)}


@pytest.mark.parametrize("kind", NOT_SIMULATED)
@pytest.mark.parametrize("command", ["what-if", "size"])
def test_what_is_not_simulated_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, command: str
) -> None:
    file = GOLDEN / f"{kind}.jsonl.zst"
    policy = tmp_path / "policy.toml"
    policy.write_text('name = "random"\n')
    words = {
        "what-if": ("replay", str(file), "--what-if", str(policy)),
        "size": ("size", "--from-log", str(file)),
    }
    assert status_of(*words[command]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"halfmoon: {NOT_SIMULATED[kind].format(lent=len(borrowers(file)))}\n")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('name = "best"', "name=best: none of halfmoon, mooncake, "),
        ("tffs = 5", "tffs: there is no such key; the keys are name, seed"),
        ("name =", "Invalid value"),
        ("[table]\na = 1", "table: there is no such key"),
    ],
)
def test_a_policy_file_that_is_none_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, complaint: str
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(content)
    assert status_of("replay", str(GOLDEN / "smollm2.jsonl.zst"), "--what-if", str(file)) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"halfmoon: --what-if {file}: {complaint}"), said
    assert said.count("\n") == 1


def test_the_command_prints_both_side_by_side_or_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('name = "random"\nttft_slo_ns = "500ms"\n')
    assert status_of("replay", str(GOLDEN / "smollm2.jsonl.zst"), "--what-if", str(file), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["simulated"]["policy"], found["what_if"]["policy"]) == ("halfmoon", "random")
    assert found["what_if"]["rejected"]["ttft_slo"] > found["simulated"]["rejected"]["ttft_slo"]
