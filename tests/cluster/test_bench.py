"""`halfmoon bench`: what it draws, what it measures, and that its counts are those of the cluster it drove."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import nats
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from halfmoon.cli.bench import driver as bench_driver
from halfmoon.cli.bench.clients import Model, Record
from halfmoon.cli.bench.driver import Driver, Limits
from halfmoon.cli.bench.report import objectives, report, table
from halfmoon.cli.bench.workload import DrawnLoad, Lengths, Planned, Texts, cut_short, fitting_scale, traced
from halfmoon.cli.main import main
from halfmoon.cli.options import OptionInvalid
from halfmoon.conductor.simulation.trace import Arrival, read_trace
from halfmoon.schemas import subjects
from halfmoon.schemas.events import PolicyChanged, RequestArrived
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.policy import Policy
from tests.cluster.harness import Cluster
from tests.eventually import BOUND_S, eventually
from tests.ports import HeldPorts

MS = 1_000_000
VOCABULARY = 49_152


@pytest.fixture
def cluster(null: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A block of a trace / 32 is one of its own. The commands of this process find the client's key."""
    monkeypatch.setenv("XDG_STATE_HOME", null.environment["XDG_STATE_HOME"])
    return null


def planned(prompt: int = 8, output: int = 4, at_ns: int = -1, number: int = 0) -> Planned:
    return Planned(number=number, at_ns=at_ns, parts=((b"own-%d" % number, prompt),), max_tokens=output)


# --- what is asked for --------------------------------------------------------------------------------------


@pytest.mark.pure
def test_lengths_are_drawn_as_their_words_say() -> None:
    rng = np.random.default_rng(1)

    def draws(text: str) -> list[int]:
        lengths = Lengths.parse(text, "--prompt-tokens")
        return [lengths.draw(rng) for _ in range(4000)]

    assert set(draws("37")) == {37}
    assert set(draws("3-5")) == {3, 4, 5}
    normal = draws("normal:100,10")
    assert 98 < np.mean(normal) < 102
    assert 9 < np.std(normal) < 11
    log = draws("lognormal:100,1")
    assert 93 < np.median(log) < 107
    assert 145 < np.mean(log) < 185  # exp(1/2) times the median
    for wrong in ("", "x", "5-3", "0", "1.5", "normal:100", "normal:a,b", "gamma:1,2", "3-4-5"):
        with pytest.raises(OptionInvalid, match="--prompt-tokens"):
            Lengths.parse(wrong, "--prompt-tokens")


@pytest.mark.pure
def test_arrivals_come_at_the_rate_and_by_the_seed() -> None:
    def at_s(**options: Any) -> list[float]:
        drawn = DrawnLoad(
            prompt=Lengths("fixed", 8), output=Lengths("fixed", 4), context=64, rate=50.0, **options
        )
        return [one.at_ns / 1e9 for one in itertools.islice(drawn.requests(), 4000)]

    gaps = np.diff(at_s(seed=3))
    assert 0.019 < gaps.mean() < 0.021
    assert 0.018 < gaps.std() < 0.022  # as large as the mean: exponential
    assert np.diff(at_s(poisson=False)).max() < 0.0201
    assert at_s(seed=3) == at_s(seed=3) != at_s(seed=4)


@pytest.mark.pure
def test_prompts_share_what_they_should_and_nothing_else() -> None:
    drawn = DrawnLoad(
        prompt=Lengths("uniform", 40, 80),
        output=Lengths("fixed", 4),
        context=512,
        shared=0.5,
        prefixes=2,
        seed=5,
    )
    texts = Texts(VOCABULARY, 5)
    prompts = [texts.prompt(one) for one in itertools.islice(drawn.requests(), 60)]
    assert {len(prompt) for prompt in prompts} <= set(range(40, 81))
    beginnings = {tuple(prompt[:20]) for prompt in prompts}  # half of the shortest
    assert len(beginnings) == 2
    assert len({tuple(prompt[len(prompt) // 2 :][:10]) for prompt in prompts}) == 60
    assert Texts(VOCABULARY, 6).prompt(planned()) != texts.prompt(planned())  # so a second run finds nothing
    assert all(VOCABULARY // 8 <= token < VOCABULARY for prompt in prompts for token in prompt)


@pytest.mark.pure
def test_a_trace_is_scaled_to_the_context_and_keeps_its_blocks() -> None:
    key = lambda *names: b"".join(name.to_bytes(16, "big") for name in names)  # noqa: E731
    arrivals = [
        Arrival(at_ns=5_000 * MS, prompt_tokens=1100, output_tokens=60, block_keys=key(1, 2)),
        Arrival(at_ns=6_000 * MS, prompt_tokens=1600, output_tokens=400, block_keys=key(1, 2, 3)),
        Arrival(at_ns=9_000 * MS, prompt_tokens=700, output_tokens=1, block_keys=key(4)),
    ]
    assert fitting_scale(arrivals, 2000) == 1
    assert fitting_scale(arrivals, 1999) == 2
    assert fitting_scale(arrivals, 400) == 8
    with pytest.raises(OptionInvalid, match="--trace: a context of 3 tokens is too short"):
        fitting_scale(arrivals, 3)
    texts = Texts(VOCABULARY, 1)
    plan = list(traced(arrivals, scale=8, speed=2.0, context=400))
    assert [one.at_ns for one in plan] == [0, 500 * MS, 2_000 * MS]
    assert [(one.prompt_tokens, one.max_tokens) for one in plan] == [(137, 7), (200, 50), (87, 1)]
    first, second, third = (texts.prompt(one) for one in plan)
    assert first[:128] == second[:128]  # two blocks of 64
    assert first[128:137] != second[128:137]
    assert third[:64] != first[:64]
    assert cut_short(arrivals, scale=8, context=200) == 1
    assert [
        one.prompt_tokens + one.max_tokens for one in traced(arrivals, scale=8, speed=1.0, context=200)
    ] == [144, 200, 88]


# --- what is measured ---------------------------------------------------------------------------------------


@pytest.mark.pure
def test_figures_of_a_run_made_by_hand() -> None:
    ran = [
        Record(planned=planned(), due_ns=0, sent_ns=5 * MS, heard_ns=[20 * MS, 30 * MS, 50 * MS]),
        Record(planned=planned(), due_ns=10 * MS, sent_ns=10 * MS, heard_ns=[110 * MS]),
        Record(planned=planned(), due_ns=20 * MS, sent_ns=20 * MS),
        Record(planned=planned(), due_ns=30 * MS, sent_ns=30 * MS),
        Record(planned=planned(), due_ns=40 * MS, sent_ns=40 * MS),
    ]
    for record, tokens in zip(ran, (3, 1), strict=False):
        record.used({"prompt_tokens": 8, "completion_tokens": tokens, "cached_tokens": 4})
        record.end("finished")
        record.ended_ns = record.heard_ns[-1]
    ran[2].refused(429, {"code": "ttft_slo", "message": "no"})
    ran[3].refused(500, {"code": "failed", "message": "no"})
    ran[2].ended_ns = ran[3].ended_ns = 60 * MS
    found = report(ran, slo={"ttft": 50, "tbt": 20}, complete=False, about={"notes": ["by hand"]})
    assert (found["requests"], found["completed"], found["failed"], found["open"]) == (5, 2, 1, 1)
    assert (found["rejected"], found["errors"]) == ({"ttft_slo": 1}, {"500 failed": 1})
    assert found["duration"] == 0.11
    assert (found["total_input_tokens"], found["total_output_tokens"], found["cached_tokens"]) == (16, 4, 8)
    assert found["request_throughput"] == round(2 / 0.11, 4)
    assert (found["request_goodput"], found["goodput_share"]) == (round(1 / 0.11, 4), 0.2)
    means = {name: found[f"mean_{name}_ms"] for name in ("ttft", "ttft_sent", "e2el", "itl", "tpot", "tbt")}
    assert means == {"ttft": 60, "ttft_sent": 57.5, "e2el": 75, "itl": 15, "tpot": 15, "tbt": 20}
    assert [found[f"{p}_ttft_ms"] for p in ("p50", "p90", "p99")] == [20, 100, 100]
    assert found["p99_send_delay_ms"] == 5
    text = table(found)
    assert text.startswith("INTERRUPTED: what had happened until then\nby hand\n")
    assert "  ttft_slo:                                     1\n" in text
    assert "20.0% (ttft <= 50 ms and tbt <= 20 ms)" in text


class SteppedTime:
    """What the driver takes for its clock: it stands still but where somebody moves it."""

    def __init__(self) -> None:
        self.now_ns = 10**9

    def monotonic_ns(self) -> int:
        return self.now_ns

    async def sleep_until(self, at_ns: int) -> None:
        await asyncio.sleep(0)
        self.now_ns = max(self.now_ns, at_ns)


class Stalling:
    """A cluster that stands still for 500 ms at its first request and answers all others at once."""

    where = "here"

    def __init__(self, time: SteppedTime) -> None:
        self._time = time

    async def open(self) -> Model:
        return Model("none", 64, 64)

    async def ask(self, record: Record, body: dict[str, Any]) -> None:
        record.sent_ns = self._time.now_ns
        if record.planned.number == 0:
            self._time.now_ns += 500 * MS
        record.heard_ns.append(self._time.now_ns)
        record.used({"prompt_tokens": 8, "completion_tokens": 1})
        record.end("finished")

    async def close(self) -> None:
        return


@pytest.mark.pure
async def test_a_stall_is_charged_to_all_who_should_have_been_sent_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepped = SteppedTime()
    monkeypatch.setattr(bench_driver, "time", stepped)
    monkeypatch.setattr(bench_driver, "_sleep_until", stepped.sleep_until)
    plan = (planned(at_ns=number * 10 * MS, number=number) for number in range(20))
    driver = Driver(Stalling(stepped), Texts(64, 0), plan, Limits(concurrency=1))
    assert await driver.run()
    assert len(driver.records) == 20
    for number, record in enumerate(driver.records):
        assert record.heard_ns[0] - record.due_ns == (500 - number * 10) * MS
        assert record.sent_ns - record.due_ns == ((500 - number * 10) * MS if number else 0)
    found = report(driver.counted, slo={}, complete=True, about={"notes": []})
    assert (found["p50_ttft_ms"], found["p50_ttft_sent_ms"]) == (400, 0)


# --- a live cluster -----------------------------------------------------------------------------------------


def halfmoon(*words: object) -> dict[str, Any]:
    """The output of `halfmoon bench ... --json`."""
    done = subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.main", "bench", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def status(nc: nats.NATS) -> dict[str, Any]:
    """The requests of `halfmoon status`, once a conductor finds the time to answer."""

    async def told() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads((await nc.request(f"{subjects.API}.status", timeout=BOUND_S)).data)
        return found if "requests" in found else None

    found = await eventually(told, "a conductor answers", every_s=0.3)
    assert found is not None
    requests: dict[str, Any] = found["requests"]
    return requests


async def counted(cluster: Cluster, nc: nats.NATS) -> dict[str, float]:
    """The cluster's own counts: the conductor's counts, and the frontend's metrics."""
    requests = await status(nc)
    counts = {name: requests[name] for name in ("arrived", "finished", "failed", "cancelled")}
    counts |= {f"rejected {reason}": count for reason, count in requests["rejected"].items()}
    async with aiohttp.ClientSession() as http, http.get(f"{cluster.http}/metrics") as response:
        text = await response.text()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"):
                counts[sample.name] = sample.value
            elif sample.name in ("vllm:request_success_total", "vllm:admission_rejections_total"):
                counts[sample.name] = counts.get(sample.name, 0) + sample.value
    return counts


async def grown(cluster: Cluster, nc: nats.NATS, before: dict[str, float], arrived: int) -> dict[str, float]:
    """By how much the counts grew, once every request that arrived has ended for the conductors too."""

    async def more() -> dict[str, float] | None:
        now = await counted(cluster, nc)
        grew = {
            name: int(value - before.get(name, 0)) for name, value in now.items() if value != before.get(name)
        }
        ends = [count for name, count in grew.items() if name in ("finished", "failed", "cancelled")]
        ends += [count for name, count in grew.items() if name.startswith("rejected ")]
        return grew if sum(ends) >= arrived else None

    grew = await eventually(more, f"{arrived} requests have ended", every_s=0.3)
    assert grew is not None
    return grew


@pytest.mark.parametrize("over", ["nats", "http"])
async def test_its_counts_are_the_clusters_own(
    cluster: Cluster, nc: nats.NATS, over: str, tmp_path: Path
) -> None:
    where = ("--http", cluster.http) if over == "http" else ("--nats", cluster.nats)
    before = await counted(cluster, nc)
    options = (
        "--requests",
        30,
        "--concurrency",
        4,
        "--warmup",
        6,
        "--prompt-tokens",
        "20-60",
        "--output-tokens",
        5,
    )
    saved = tmp_path / "run.json"
    found = await asyncio.to_thread(halfmoon, *where, *options, "--save", saved, "--goodput", "ttft:60000")
    assert (found["backend"], found["complete"], found["load"]) == (over, True, "closed")
    assert (found["requests"], found["completed"], found["failed"], found["rejected"]) == (30, 30, 0, {})
    assert (found["total_output_tokens"], found["goodput_share"]) == (150, 1.0)
    assert 0 < found["p50_ttft_ms"] <= found["p90_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    more = await grown(cluster, nc, before, 36)
    assert (more["arrived"], more["finished"], more["vllm:request_success_total"]) == (36, 36, 36)
    assert more["vllm:generation_tokens_total"] == 36 * 5
    kept = json.loads(saved.read_text())
    assert len(kept["each"]) == 30
    assert sum(row["prompt_tokens"] for row in kept["each"]) == found["total_input_tokens"]
    log = [s.event for s in await cluster.events() if isinstance(s.event, RequestArrived)][-36:]
    assert not any(event.traceparent for event in log)  # nobody switched tracing on
    assert more["vllm:prompt_tokens_total"] == sum(event.prompt_tokens for event in log)
    ids = {event.request_id: event.prompt_tokens for event in log}
    assert all(ids[row["request_id"]] == row["prompt_tokens"] for row in kept["each"])


@pytest.mark.slow
async def test_rejections_are_counted_by_reason(cluster: Cluster, nc: nats.NATS) -> None:
    """Queues of one, and more requests at once than that: some are refused; how many, the cluster knows."""
    bus = await cluster.bus()
    before = await counted(cluster, nc)
    completed = rejected = 0
    try:
        strict = Policy(admission="predicted", queued_max_per_worker=1)
        await bus.append(PolicyChanged(policy=strict), source_id=subjects.OPERATOR)
        load = ("--requests", 30, "--rate", 1000, "--output-tokens", 1000, "--goodput", "ttft:60000")
        for where in (("--nats", cluster.nats), ("--http", cluster.http)):
            found = await asyncio.to_thread(halfmoon, *where, *load)
            assert (found["load"], found["failed"], list(found["rejected"])) == ("poisson", 0, ["queue_full"])
            assert found["completed"] + found["rejected"]["queue_full"] == 30
            # Refused ones count against it.
            assert found["goodput_share"] == round(found["completed"] / 30, 6)
            completed += found["completed"]
            rejected += found["rejected"]["queue_full"]
    finally:
        await bus.append(PolicyChanged(policy=Policy(admission="none")), source_id=subjects.OPERATOR)
        await bus.close()
    more = await grown(cluster, nc, before, 60)
    assert (more["arrived"], more["finished"], more["vllm:request_success_total"]) == (
        60,
        completed,
        completed,
    )
    assert (more["rejected queue_full"], more["vllm:admission_rejections_total"]) == (rejected, rejected)


async def test_a_trace_is_replayed_with_the_blocks_it_shares(cluster: Cluster, tmp_path: Path) -> None:
    """Each block of the trace is one of the cluster's, and two are the same here exactly where they are
    there.
    """
    ids = [[7, 8, 9], [7, 8, 10, 11], [12, 13], [7, 8, 10, 11, 14]]
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 + 400 * n,
            "input_length": 512 * len(row) - 100,
            "output_length": 96,
            "hash_ids": row,
        }
        for n, row in enumerate(ids)
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    after = len(await cluster.events())
    saved = tmp_path / "run.json"
    found = await asyncio.to_thread(
        halfmoon, "--nats", cluster.nats, "--trace", file, "--speed", 4, "--scale", 32, "--save", saved
    )
    assert (found["completed"], found["scale"], found["cut_short"]) == (4, 32, 0)
    assert "lengths / 32 (a block of 512 tokens is one of 16)" in found["notes"][1]
    each = json.loads(saved.read_text())["each"]
    assert [row["due_ms"] for row in each] == [0, 100, 200, 300]
    assert all(row["due_ms"] <= row["sent_ms"] < row["tokens_ms"][0] for row in each)
    assert [(row["prompt_tokens"], row["completion_tokens"]) for row in each] == [
        ((512 * len(row) - 100) // 32, 3) for row in ids
    ]
    events = [s.event for s in await cluster.events() if isinstance(s.event, RequestArrived)]
    sent = {event.request_id: event for event in events}
    assert after
    of_trace: dict[int, bytes] = {}
    for row, one in zip(ids, each, strict=True):
        keys = split_keys(sent[one["request_id"]].block_keys)
        assert len(keys) == len(row) - 1  # the last is no whole block
        for name, key in zip(row, keys, strict=False):
            assert of_trace.setdefault(name, key) == key
    assert len(set(of_trace.values())) == len(of_trace)


def begun(*words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "halfmoon.cli.main", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
async def test_ctrl_c_gives_a_partial_report_and_ends_what_runs(cluster: Cluster, nc: nats.NATS) -> None:
    load = ("--requests", "1000", "--concurrency", "2", "--output-tokens", "2000-4000")
    running_bench = begun("bench", "--nats", cluster.nats, *load, "--json")
    try:
        before = await counted(cluster, nc)

        async def three_more() -> bool:
            return (await counted(cluster, nc))["finished"] >= before["finished"] + 3

        await eventually(three_more, "three requests are finished", every_s=0.2)
        running_bench.send_signal(signal.SIGINT)
        out, err = await asyncio.to_thread(running_bench.communicate, timeout=BOUND_S)
    finally:
        running_bench.kill()
    assert (running_bench.returncode, err) == (130, b"")
    found = json.loads(out)
    assert found["complete"] is False
    assert found["completed"] >= 3
    assert (found["failed"], found["rejected"]) == (0, {})
    assert found["requests"] == found["completed"] + found["open"]
    assert 1 <= found["open"] <= 2

    async def all_ended() -> bool:
        return not (await status(nc))["in_flight"]

    await eventually(all_ended, "nothing is in flight", every_s=0.2)


# --- what cannot be -----------------------------------------------------------------------------------------


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that `halfmoon bench` says on standard error, with status 1."""

    def ask_for(*flags: object) -> str:
        with pytest.raises(SystemExit) as end:
            main(["bench", *map(str, flags)])
        out, err = capsys.readouterr()
        assert (end.value.code, len(err.splitlines()), out) == (1, 1, ""), err
        assert err.startswith("halfmoon: ")
        return err

    return ask_for


def test_wrong_input_is_one_line_that_names_it(
    refusal: Callable[..., str], cluster: Cluster, tmp_path: Path
) -> None:
    there = ("--nats", cluster.nats)
    assert "--goodput speed:3: NAME:MS" in refusal("--goodput", "speed:3")
    assert "--goodput ttft:soon: NAME:MS" in refusal("--goodput", "ttft:soon")
    assert "--rate -1: 0 to" in refusal("--rate", -1)
    assert "--shared-prefix 2: 0 to 1" in refusal("--shared-prefix", 2)
    assert "--scale 3: a power of two" in refusal("--scale", 3)
    assert "--trace and --rate" in refusal("--rate", 1, "--trace", "x")
    assert "--save: there is no directory" in refusal("--save", tmp_path / "no" / "file")
    assert "--prompt-tokens many: N, A-B" in refusal(*there, "--prompt-tokens", "many")
    too_long = refusal(*there, "--prompt-tokens", 9_000_000, "--output-tokens", 100)
    assert "9000100 in all are more than the model's context of" in too_long
    broken = tmp_path / "broken.jsonl"
    broken.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n{"timestamp": "x"}\n'
    )
    assert f"{broken}:2: " in refusal(*there, "--trace", broken)
    assert "no/such" in refusal(*there, "--trace", "no/such")
    with HeldPorts() as port:
        nobody = f"127.0.0.1:{port}"
        assert f"no frontend answers over NATS at nats://{nobody}" in refusal("--nats", f"nats://{nobody}")
        assert f"no frontend answers over HTTP at http://{nobody}" in refusal("--http", f"http://{nobody}")


@pytest.mark.slow
@pytest.mark.pure
def test_the_conversation_trace_fits_this_models_context() -> None:
    trace = read_trace(Path(__file__).parents[2] / "benchmarks/traces/conversation_trace.jsonl.zst")
    assert fitting_scale(trace, 8192) == 16
    longest = max(
        one.prompt_tokens + one.max_tokens for one in traced(trace, scale=16, speed=1.0, context=8192)
    )
    assert 4096 < longest <= 8192
    assert objectives(["ttft:500", "tbt:100"]) == {"ttft": 500.0, "tbt": 100.0}
