"""One self-contained page that shows a run: template, style, programs and data in one file, nothing from
outside.

The data are JSON, compressed, and decompressed by the browser; the explanations apart, since they are looked
at one by one.
"""

from __future__ import annotations

import base64
import gzip
import html
import string
from importlib.resources import files
from typing import Any

import orjson

from halfmoon.conductor.replay.explain import answer_times, decided_rows
from halfmoon.conductor.replay.histories import RequestHistory
from halfmoon.conductor.replay.text import clock, duration
from halfmoon.conductor.replay.timeline import Bar, Timeline
from halfmoon.schemas.roles import ROLES

US_NS = 1_000


def page(timeline: Timeline, *, title: str) -> str:
    """The page, as HTML."""
    here = files("halfmoon.conductor.replay")
    read = {
        name: (here / name).read_text()
        for name in ("page.html", "page.css", "run_view.js", "request_panel.js")
    }
    return string.Template(read["page.html"]).substitute(
        title=html.escape(title),
        css=read["page.css"],
        js=read["run_view.js"] + read["request_panel.js"],
        run=_packed(_run(timeline)),
        why=_packed([decided_rows(history) for history in timeline.histories]),
    )


def _packed(value: Any) -> str:
    return base64.b64encode(gzip.compress(orjson.dumps(value), 6, mtime=0)).decode()


def _run(timeline: Timeline) -> dict[str, Any]:
    """The data that `run_view.js` knows as RUN; times in microseconds since the first event."""
    lanes = {lane: number for number, lane in enumerate(timeline.lanes)}
    histories, start_ns = timeline.histories, timeline.start_ns
    samples = timeline.samples
    prefills = [lane for lane, role in timeline.lanes.items() if "prompts" in ROLES[role].duties]
    decodes = [lane for lane, role in timeline.lanes.items() if "batch" in ROLES[role].duties]
    facts = (
        f"{timeline.model}, policy {timeline.policy.name}, {clock(start_ns)} UTC, "
        f"{duration(timeline.end_ns - start_ns)}, {len(histories):,} requests, {timeline.events:,} events, "
        f"{timeline.decisions:,} decisions"
    )
    return {
        "meta": {"facts": facts, "span": max(1, (timeline.end_ns - start_ns) // US_NS)},
        "lanes": [
            {"id": lane, "role": role, "rows": timeline.rows[lane]} for lane, role in timeline.lanes.items()
        ],
        "requests": {
            "id": [history.arrived.request_id for history in histories],
            "seq": [history.seq for history in histories],
            "at": [(history.arrived_ns - start_ns) // US_NS for history in histories],
            "end": [(history.end_ns - start_ns) // US_NS if history.end_ns else 0 for history in histories],
            "ending": [history.ending for history in histories],
            "prompt": [history.arrived.prompt_tokens for history in histories],
            "max": [history.arrived.max_tokens for history in histories],
            "text": [_ending(history) for history in histories],
        },
        "prefill": [_bar(bar, lanes) for bar in timeline.prefill],
        "decode": [_bar(bar, lanes) for bar in timeline.decode],
        "happenings": [
            [h.at_ns // US_NS, h.kind, lanes.get(h.lane, -1), h.text] for h in timeline.happenings
        ],
        "curves": {
            "t": [sample.at_ns // US_NS for sample in samples],
            "queue": [[sample.queue_ns.get(lane, 0) // US_NS for sample in samples] for lane in prefills],
            "sequences": [[sample.sequences.get(lane, 0) for sample in samples] for lane in decodes],
            "requests": [sample.requests for sample in samples],
            "blocks": [sample.index_blocks for sample in samples],
            "prompt": [sample.prompt_tokens for sample in samples],
            "cached": [sample.cached_tokens for sample in samples],
        },
    }


def _ending(history: RequestHistory) -> str:
    done = history.finished
    if done is None:
        return history.reason
    return f"{done.completion_tokens} tokens ({done.finish_reason}), {answer_times(done)}"


def _bar(bar: Bar, lanes: dict[str, int]) -> list[Any]:
    transfer = [at_ns // US_NS for at_ns in bar.transfer] if bar.transfer else 0
    parts, chunks, marks = (
        [at_ns // US_NS for at_ns in times] for times in (bar.parts, bar.chunks, bar.marks)
    )
    return [
        bar.request,
        bar.order_id,
        lanes.get(bar.lane, 0),
        bar.row,
        parts,
        transfer,
        chunks,
        marks,
        bar.lost,
    ]
