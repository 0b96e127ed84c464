"""A run as a trace that ui.perfetto.dev opens: Chrome's trace event format, JSON.

A worker is a process, and each row of its lane a thread, so that slices of a thread nest and never cross. An
arrow leads from a prefill to its decode. Queues, sequences, blocks and requests are counters.

Source: the Trace Event Format (Chrome), as Perfetto imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from halfmoon.conductor.replay import explain
from halfmoon.conductor.replay.histories import RequestHistory
from halfmoon.conductor.replay.timeline import Bar, Timeline

#: Process number for lanes of no worker; workers follow.
CLUSTER_PID = 1
_PREFILL_PARTS = ("queue", "prefill", "delivery")
_DECODE_PARTS = ("wait for KV", "decode")


def trace(timeline: Timeline) -> bytes:
    """The file."""
    return orjson.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(timeline))})


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    pids = {lane: CLUSTER_PID + 1 + number for number, lane in enumerate(timeline.lanes)}
    yield _named("process_name", CLUSTER_PID, 0, "cluster")
    yield _named("thread_name", CLUSTER_PID, 1, "rejected, failed, cancelled")
    yield _named("thread_name", CLUSTER_PID, 2, "processes")
    for lane, pid in pids.items():
        yield _named("process_name", pid, 0, lane)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for row in range(timeline.rows[lane]):
            yield _named("thread_name", pid, row + 1, f"{timeline.lanes[lane]} {row}")
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": pid,
                "tid": row + 1,
                "args": {"sort_index": row},
            }
    for bar in timeline.prefill:
        yield from _slices(bar, timeline.histories[bar.request], pids[bar.lane], _PREFILL_PARTS)
        if bar.transfer:
            begin, end = (min(max(at_ns, bar.parts[0]), bar.parts[-1]) for at_ns in bar.transfer)
            yield _async("b", "KV from another node", bar, begin, pids[bar.lane])
            yield _async("e", "KV from another node", bar, end, pids[bar.lane])
    for bar in timeline.decode:
        yield from _slices(bar, timeline.histories[bar.request], pids[bar.lane], _DECODE_PARTS)
    yield from _arrows(timeline, pids)
    yield from _instants(timeline, pids)
    yield from _counters(timeline, pids)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(ns: int) -> float:
    return ns / 1_000


def _slices(bar: Bar, history: RequestHistory, pid: int, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The order, in it its parts, in a prefill its chunks; KV of a layer as instants."""
    arrived = history.arrived
    args: dict[str, Any] = {
        "order": bar.order_id,
        "prompt_tokens": arrived.prompt_tokens,
        "max_tokens": arrived.max_tokens,
        "ending": history.ending,
    }
    if bar.lost:
        args["given_up"] = bar.lost
    for why in history.why:
        args[f"event {why.seq}"] = explain.verdict_text(why)
    tid = bar.row + 1
    yield _slice(arrived.request_id, bar.parts[0], bar.parts[-1], pid, tid, args)
    if len(bar.parts) == 2:
        return
    for name, begin, end in zip(names, bar.parts, bar.parts[1:], strict=False):
        if end > begin:
            yield _slice(name, begin, end, pid, tid, {})
    computes, computed = (bar.parts[1], bar.parts[2]) if names is _PREFILL_PARTS else (0, 0)
    inside = [at_ns for at_ns in bar.chunks if computes < at_ns < computed]
    for number, (begin, end) in enumerate(zip([computes, *inside], [*inside, computed], strict=True)):
        if inside and end > begin:
            yield _slice(f"chunk {number}", begin, end, pid, tid, {})
    for at_ns in bar.marks:
        yield {"ph": "i", "s": "t", "name": "KV of a layer ready", "ts": _us(at_ns), "pid": pid, "tid": tid}


def _slice(name: str, begin: int, end: int, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        **{"ph": "X", "cat": "halfmoon", "name": name, "ts": _us(begin), "dur": _us(end - begin)},
        **{"pid": pid, "tid": tid, "args": args},
    }


def _async(phase: str, name: str, bar: Bar, at_ns: int, pid: int) -> dict[str, Any]:
    return {
        "ph": phase,
        "cat": "transfer",
        "name": name,
        "id": bar.order_id,
        "ts": _us(at_ns),
        "pid": pid,
        "tid": 0,
    }


def _arrows(timeline: Timeline, pids: dict[str, int]) -> Iterator[dict[str, Any]]:
    """An arrow from the end of each prefill to the decode of its order."""
    prefills = {bar.order_id: bar for bar in timeline.prefill if len(bar.parts) > 2}
    for number, bar in enumerate(timeline.decode):
        source = prefills.get(bar.order_id)
        if source is not None:
            ends = ((source, "s", source.parts[2]), (bar, "f", max(bar.parts[0], source.parts[2])))
            for end, phase, at_ns in ends:
                yield {
                    **{"ph": phase, "bp": "e", "cat": "halfmoon", "name": "KV", "id": number},
                    **{"ts": _us(at_ns), "pid": pids[end.lane], "tid": end.row + 1},
                }


def _instants(timeline: Timeline, pids: dict[str, int]) -> Iterator[dict[str, Any]]:
    for history in timeline.histories:
        if history.ending in ("rejected", "failed", "cancelled"):
            yield {
                **{
                    "ph": "i",
                    "s": "t",
                    "name": history.ending,
                    "ts": _us(history.end_ns - timeline.start_ns),
                },
                **{"pid": CLUSTER_PID, "tid": 1},
                "args": {"request": history.arrived.request_id, "reason": history.reason},
            }
    for happening in timeline.happenings:
        yield {
            **{
                "ph": "i",
                "s": "p",
                "name": f"{happening.kind}: {happening.text}",
                "ts": _us(happening.at_ns),
            },
            **{"pid": pids.get(happening.lane, CLUSTER_PID), "tid": 1 if happening.lane in pids else 2},
        }


def _counters(timeline: Timeline, pids: dict[str, int]) -> Iterator[dict[str, Any]]:
    def counter(name: str, pid: int, at_ns: int, value: float) -> dict[str, Any]:
        return {"ph": "C", "name": name, "ts": _us(at_ns), "pid": pid, "args": {"value": value}}

    for sample in timeline.samples:
        at_ns = sample.at_ns
        yield counter("requests", CLUSTER_PID, at_ns, sample.requests)
        yield counter("blocks in the index", CLUSTER_PID, at_ns, sample.index_blocks)
        found = 100 * sample.cached_tokens / max(1, sample.prompt_tokens)
        yield counter("tokens found, %", CLUSTER_PID, at_ns, round(found, 2))
        for lane, queue_ns in sample.queue_ns.items():
            yield counter("predicted queue, ms", pids[lane], at_ns, queue_ns / 1_000_000)
        for lane, sequences in sample.sequences.items():
            yield counter("sequences", pids[lane], at_ns, sequences)
            yield counter("KV reserved, %", pids[lane], at_ns, sample.kv_share[lane] / 10)
