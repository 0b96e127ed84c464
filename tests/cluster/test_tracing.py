"""OpenTelemetry: spans of all processes of a real cluster under one trace id, taken by a real OTLP receiver."""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import nats
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from halfmoon.bus.telemetry.tracing import checked_traceparent
from halfmoon.cli.main import main
from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.tracing import start_tracing
from halfmoon.schemas import subjects
from halfmoon.schemas.events import PolicyChanged, RequestArrived
from halfmoon.schemas.policy import Policy
from tests.cluster.harness import Cluster, running
from tests.cluster.steering import draining
from tests.eventually import BOUND_S, eventually
from tests.ports import HeldPorts

CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
#: Clocks of one machine, read by several processes.
SLACK_NS = 5_000_000
REQUEST = "text_completion smollm2-135m-instruct"


@dataclass
class Told:
    """A span as it came."""

    name: str
    service: str
    process: str
    trace: str
    span: str
    parent: str
    begin_ns: int
    end_ns: int
    error: str
    about: dict[str, Any] = field(default_factory=dict)


class Receiver:
    """Takes spans at `/v1/traces`, once it listens."""

    def __init__(self) -> None:
        self._port = HeldPorts()
        self.url = f"http://127.0.0.1:{self._port.first}"
        self.spans: list[Told] = []
        self._server: http.server.ThreadingHTTPServer | None = None

    def listen(self) -> None:
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                receiver.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self._port.first), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, payload: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(payload).resource_spans:
            of = {one.key: one.value.string_value for one in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                told = Told(
                    name=span.name,
                    service=of["service.name"],
                    process=of["service.instance.id"],
                    trace=span.trace_id.hex(),
                    span=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    begin_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
                )
                for one in span.attributes:
                    kind = one.value.WhichOneof("value")
                    value = getattr(one.value, kind)
                    listed = [each.string_value for each in value.values] if kind == "array_value" else value
                    told.about[one.key] = listed
                self.spans.append(told)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._port.close()

    async def wait(self, done: Callable[[list[Told]], object], what: str) -> None:
        await eventually(lambda: done(list(self.spans)), what, every_s=0.05)

    async def of(self, trace: str, names: set[str]) -> dict[str, Told]:
        """The spans of a trace by name, once those are there."""
        await self.wait(
            lambda spans: names <= {told.name for told in spans if told.trace == trace}, f"{names} in {trace}"
        )
        found = [told for told in self.spans if told.trace == trace]
        assert len({told.name for told in found}) == len(found), [told.name for told in found]
        return {told.name: told for told in found}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def traced_by_environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        yield patch


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, traced_by_environment: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Nothing computed; switched on by the variable that everybody knows. The receiver does not listen yet."""
    traced_by_environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    with running(
        tmp_path_factory.mktemp("traced"), "--prefill", "1", "--decode", "1", "--engine", "null"
    ) as cluster:
        yield cluster


async def ask(cluster: Cluster, traceparent: str = "", **fields: Any) -> int:
    """The status of one answer over HTTP."""
    body = {"prompt": "The moon", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"traceparent": traceparent} if traceparent else {}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.post(f"{cluster.http}/v1/completions", json=body, headers=headers) as response,
    ):
        await response.read()
        return response.status


def within(inner: Told, outer: Told) -> bool:
    return outer.begin_ns - SLACK_NS <= inner.begin_ns <= inner.end_ns <= outer.end_ns + SLACK_NS


#: Each span's parent, and the process that tells it; where nothing is computed there is no store.
TREE = {
    "conductor.place": (REQUEST, "conductor-0"),
    "prefill": (REQUEST, "prefill-0"),
    "prefill.queue": ("prefill", "prefill-0"),
    "prefill.compute": ("prefill", "prefill-0"),
    "decode": (REQUEST, "decode-0"),
    "decode.kv": ("decode", "decode-0"),
    "decode.queue": ("decode", "decode-0"),
    "decode.first_step": ("decode", "decode-0"),
    "decode.steps": ("decode", "decode-0"),
}


@pytest.mark.slow
async def test_an_endpoint_that_is_not_there_disturbs_nothing(cluster: Cluster, receiver: Receiver) -> None:
    """Each process says so once, and once that it is there again: then the receiver listens, for all that
    follows.
    """
    for _ in range(20):
        assert await ask(cluster) == 200
    names = ["conductor-0", "decode-0", "frontend-0", "prefill-0"]
    lost, again = (
        f"tracing: {receiver.url}/v1/traces does not take spans: they are dropped",
        "takes spans again",
    )

    async def all_say(words: str) -> bool:
        assert await ask(cluster) == 200  # there is something to tell
        return all(words in cluster.output(name) for name in names)

    await eventually(lambda: all_say(lost), "all say that spans are dropped", every_s=0.2)
    assert receiver.spans == []
    receiver.listen()
    await eventually(lambda: all_say(again), "all say that spans are taken", every_s=0.2)
    for name in names:
        assert cluster.output(name).count(lost) == 1
        assert "Traceback" not in cluster.output(name)


@pytest.mark.slow
async def test_one_trace_from_the_client_to_the_last_token(cluster: Cluster, receiver: Receiver) -> None:
    assert await ask(cluster, f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", top_k=5) == 200
    spans = await receiver.of(CLIENT_TRACE, {REQUEST, *TREE})
    assert set(spans) == {REQUEST, *TREE}
    request = spans[REQUEST]
    assert (request.parent, request.process, request.error) == (CLIENT_SPAN, "frontend-0", "")
    for name, (parent, process) in TREE.items():
        told = spans[name]
        assert (told.parent, told.process, told.error) == (spans[parent].span, process, "")
        assert told.service == f"halfmoon-{process.partition('-')[0]}"
        assert within(told, spans[parent]), (told, spans[parent])
    for before, after in (("prefill.queue", "prefill.compute"), ("decode.queue", "decode.first_step")):
        assert spans[before].end_ns <= spans[after].begin_ns + SLACK_NS
    assert spans["prefill.compute"].end_ns <= spans["decode.first_step"].begin_ns + SLACK_NS
    request_id = request.about["halfmoon.request_id"]
    assert (
        request.about
        | {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "halfmoon",
            "gen_ai.request.model": "smollm2-135m-instruct",
            "gen_ai.request.max_tokens": 6,
            "gen_ai.request.top_k": 5,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.response.id": request_id,
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": 2,
            "gen_ai.usage.output_tokens": 6,
            "halfmoon.prefill_worker": "prefill-0",
            "halfmoon.decode_worker": "decode-0",
        }
        == request.about
    )
    assert (
        0
        < request.about["gen_ai.server.time_to_first_token"] * 1e9
        <= request.end_ns - request.begin_ns + SLACK_NS
    )
    assert {
        spans[name].about["halfmoon.request_id"] for name in ("conductor.place", "prefill", "decode")
    } == {request_id}
    # No text of anybody's.
    assert "moon" not in str([told.about for told in spans.values()]).replace("halfmoon", "")


@pytest.mark.slow
async def test_over_nats_with_and_without_a_trace_of_the_clients(
    cluster: Cluster, nc: nats.NATS, receiver: Receiver
) -> None:
    before = len(receiver.spans)
    body = json.dumps({"prompt": "Once", "max_tokens": 2, "ignore_eos": True}).encode()
    trace = "1" * 32
    reply = await nc.request(
        f"{subjects.API}.generate",
        body,
        headers={"traceparent": f"00-{trace}-{CLIENT_SPAN}-01"},
        timeout=BOUND_S,
    )
    mine = json.loads(reply.data)["id"]
    spans = await receiver.of(trace, {REQUEST, *TREE} - {"decode.steps"})
    assert spans[REQUEST].parent == CLIENT_SPAN
    assert spans[REQUEST].about["halfmoon.request_id"] == mine
    reply = await nc.request(f"{subjects.API}.generate", body, timeout=BOUND_S)
    other = json.loads(reply.data)["id"]

    def roots(found: list[Told]) -> list[Told]:
        return [told for told in found[before:] if told.about.get("gen_ai.response.id") == other]

    await receiver.wait(roots, "the root of the other request")
    root = roots(receiver.spans)[0]
    assert (root.parent, root.trace != trace) == ("", True)
    await receiver.of(root.trace, {REQUEST, "prefill", "decode", "conductor.place"})


@pytest.mark.slow
async def test_what_the_client_does_not_sample_is_not_traced(cluster: Cluster, receiver: Receiver) -> None:
    off, on = "2" * 32, "3" * 32
    assert await ask(cluster, f"00-{off}-{CLIENT_SPAN}-00") == 200
    assert await ask(cluster, f"00-{on}-{CLIENT_SPAN}-01") == 200
    await receiver.of(on, {REQUEST, *TREE})  # all that came before has been told by now
    assert not [told for told in receiver.spans if told.trace == off]
    log = [s.event for s in await cluster.events() if isinstance(s.event, RequestArrived)]
    assert [event.traceparent[3:35] for event in log[-2:]] == ["", on]


@pytest.mark.slow
async def test_a_refusal_is_an_error_with_its_reason(cluster: Cluster, receiver: Receiver) -> None:
    bus = await cluster.bus()
    try:
        strict = Policy(admission="predicted", queued_max_per_worker=1)
        await bus.append(PolicyChanged(policy=strict), source_id=subjects.OPERATOR)
        traces = [f"{number:032x}" for number in range(1, 31)]
        asked = [ask(cluster, f"00-{trace}-{CLIENT_SPAN}-01", max_tokens=1000) for trace in traces]
        statuses = await asyncio.gather(*asked)
    finally:
        await bus.append(PolicyChanged(policy=Policy()), source_id=subjects.OPERATOR)
        await bus.close()
    refused = [trace for trace, status in zip(traces, statuses, strict=True) if status == 429]
    assert refused, statuses
    for trace in refused:
        spans = await receiver.of(trace, {REQUEST, "conductor.reject"})
        assert set(spans) == {REQUEST, "conductor.reject"}
        assert spans[REQUEST].about["error.type"] == "queue_full"
        assert spans[REQUEST].error
        assert spans["conductor.reject"].about["halfmoon.reason"] == "queue_full"
        assert spans["conductor.reject"].parent == spans[REQUEST].span


@pytest.mark.slow
async def test_the_log_of_a_traced_cluster_replays_identically(cluster: Cluster, tmp_path: Path) -> None:
    assert await ask(cluster) == 200
    file = tmp_path / "log.jsonl"
    for words in (("events", "save", str(file), "--nats", cluster.nats), ("replay", str(file), "--json")):
        command = [sys.executable, "-m", "halfmoon.cli.main", *words]
        done = await asyncio.to_thread(
            subprocess.run, command, env=cluster.environment, capture_output=True, text=True, timeout=BOUND_S
        )
        assert done.returncode == 0, done.stderr
    assert '"traceparent"' in file.read_text()
    assert json.loads(done.stdout)["identical"] is True


@pytest.mark.slow
async def test_the_stores_tell_of_the_transfer(
    tmp_path: Path, receiver: Receiver, traced_by_environment: pytest.MonkeyPatch
) -> None:
    """With a model that computes, switched on by the option; the second request finds its prefix elsewhere."""
    traced_by_environment.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    if receiver._server is None:
        receiver.listen()
    flags = ("--prefill", "2", "--decode", "1", "--block-tokens", "16", "--otlp", receiver.url)
    prompt = list(range(1000, 1200))
    with running(tmp_path, *flags) as cluster:
        first, second = "4" * 32, "5" * 32
        assert await ask(cluster, f"00-{first}-{CLIENT_SPAN}-01", prompt=prompt) == 200
        spans = await receiver.of(first, {REQUEST, "transfer", *TREE})
        worker = spans["prefill"].process
        transfer = spans["transfer"]
        assert (transfer.parent, transfer.process, transfer.service) == (
            spans["prefill"].span,
            f"store-{worker}",
            "halfmoon-store",
        )
        assert transfer.about["halfmoon.target_node"] == "decode-0"
        # Tokens of all layers, float32. The last block is not full.
        assert transfer.about["halfmoon.bytes"] == len(prompt) * 30 * 2 * 3 * 64 * 4
        assert within(transfer, spans["prefill"])
        assert {told.process for told in spans.values()} == {
            "frontend-0",
            "conductor-0",
            worker,
            "decode-0",
            f"store-{worker}",
        }
        async with draining(cluster, worker):
            assert await ask(cluster, f"00-{second}-{CLIENT_SPAN}-01", prompt=[*prompt, 77, 78]) == 200
        spans = await receiver.of(second, {REQUEST, "transfer", "fetch", *TREE})
        other = spans["prefill"].process
        fetch = spans["fetch"]
        assert other != worker
        assert (fetch.parent, fetch.process) == (spans["prefill"].span, f"store-{other}")
        assert fetch.about["halfmoon.source_node"] in (worker, "decode-0")
        assert fetch.about["halfmoon.bytes"] == 12 * 16 * 30 * 2 * 3 * 64 * 4  # the whole ones
        assert spans["prefill"].about["halfmoon.cached_fetched_tokens"] == 12 * 16
        assert within(fetch, spans["prefill"])


# --- off, and wrong -----------------------------------------------------------------------------------------


def test_nothing_is_imported_where_it_is_off() -> None:
    code = (
        "import sys, halfmoon.cli.main, halfmoon.workers.prefill.worker, halfmoon.workers.decode.worker\n"
        "import halfmoon.workers.frontend.frontend\n"
        "import halfmoon.store.agent.agent, halfmoon.conductor.live.shell\n"
        "from halfmoon.bus.telemetry.tracing import start\n"
        "assert start(role='frontend', process_id='f', cluster='c') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    untraced = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=untraced, capture_output=True, text=True, timeout=BOUND_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.pure
@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        f"00-{'0' * 32}-{CLIENT_SPAN}-01",
        f"00-{CLIENT_TRACE}-{'0' * 16}-01",
        f"ff-{CLIENT_TRACE}-{CLIENT_SPAN}-01",
        f"00-{CLIENT_TRACE}-x-01",
        f"00-{CLIENT_TRACE.upper()}-{CLIENT_SPAN}-01",
    ],
)
def test_what_is_no_traceparent_begins_a_trace_of_its_own(text: str) -> None:
    assert checked_traceparent(text) == ""
    assert checked_traceparent(f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01")


@pytest.mark.pure
def test_without_its_packages_the_option_is_refused_and_the_variable_only_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    args = argparse.Namespace(cluster="c", otlp="")
    assert start_tracing(args, "frontend", "frontend-0") is None
    warned = capsys.readouterr().err
    assert warned.startswith("halfmoon: warning: no traces: ")
    assert warned.endswith("pip install 'halfmoon[otel]'\n")
    args.otlp = "http://127.0.0.1:1"
    with pytest.raises(OptionInvalid, match=r"--otlp: .*halfmoon\[otel\]"):
        start_tracing(args, "frontend", "frontend-0")


@pytest.mark.pure
def test_an_endpoint_that_is_no_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["up", "--otlp", "localhost:4318"])
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("halfmoon: --otlp localhost:4318: http:// or https://")
