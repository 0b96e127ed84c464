"""The report of a run of `halfmoon bench`: figures under the names that serving benchmarks use, and a table.

TTFT: to the first token; E2EL: to the last. Both count from when the request should have been sent;
`..._sent`: from when it was. ITL: between two messages with tokens, of all requests. TPOT: its mean in a
request. TBT: the mean of the longest 10 % of a request's, at least one. A p-th percentile is the smallest
value that p % are not above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from halfmoon.cli.bench.clients import Record
from halfmoon.cli.options import OptionInvalid
from halfmoon.conductor.simulation.report import Percentiles, spread
from halfmoon.schemas.numbers import MS_NS, tbt_ns

#: Figure of an objective → its name in the table.
MEASURES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "tbt": "Time Between Tokens (longest 10 % of a request)",
    "e2el": "End-to-end Latency",
}
OBJECTIVES = ("ttft", "tpot", "tbt", "e2el")


def objectives(texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds by measure, from `ttft:500 tbt:100`. Raises OptionInvalid."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = 0.0
        if name not in OBJECTIVES or not 0 < found[name] < 1e12:
            raise OptionInvalid(f"--goodput {text}: NAME:MS, the name one of {', '.join(OBJECTIVES)}")
    return found


def intervals(record: Record) -> list[int]:
    return [after - before for before, after in zip(record.heard_ns, record.heard_ns[1:], strict=False)]


def measures(record: Record) -> dict[str, int]:
    """ns by measure, of a finished request; without those that one message cannot have."""
    last_ns = record.heard_ns[-1]
    found = {"ttft": record.heard_ns[0] - record.due_ns, "e2el": last_ns - record.due_ns}
    if gaps := intervals(record):
        found["tbt"] = tbt_ns(gaps)
        found["tpot"] = (last_ns - record.heard_ns[0]) // max(1, record.completion_tokens - 1)
    return found


def report(
    records: Sequence[Record], *, slo: dict[str, float], complete: bool, about: dict[str, Any]
) -> dict[str, Any]:
    """The figures of the counted requests; `about`, the description of the run, comes first."""
    finished = [record for record in records if record.outcome == "finished" and record.heard_ns]
    empty = sum(record.outcome == "finished" and not record.heard_ns for record in records)
    every = [measures(record) for record in finished]
    ends = [record.ended_ns for record in records if record.ended_ns]
    duration_s = max(max(ends) - min(record.due_ns for record in records), 1) / 1e9 if ends else 0.0
    output = sum(record.completion_tokens for record in finished)
    prompt = sum(record.prompt_tokens for record in finished)
    good = sum(all(of.get(name, 0) <= limit * MS_NS for name, limit in slo.items()) for of in every)

    def a_second(count: int) -> float:
        return round(count / duration_s, 4) if duration_s else 0.0

    errors = Counter(record.reason for record in records if record.outcome == "failed")
    if empty:
        errors["finished without a token"] += empty
    found: dict[str, Any] = {
        "complete": complete,
        **about,
        "requests": len(records),
        "completed": len(finished),
        "failed": sum(errors.values()),
        "rejected": dict(
            sorted(Counter(record.reason for record in records if record.outcome == "rejected").items())
        ),
        "errors": dict(sorted(errors.items())),
        "open": sum(not record.outcome for record in records),
        "duration": round(duration_s, 3),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "cached_tokens": sum(record.cached_tokens for record in finished),
        "request_throughput": a_second(len(finished)),
        "output_throughput": a_second(output),
        "total_token_throughput": a_second(prompt + output),
        "slo_ms": slo,
        "request_goodput": a_second(good) if slo else None,
        "goodput_share": round(good / len(records), 6) if slo and records else None,
    }
    gaps = [gap for record in finished for gap in intervals(record)]
    for name in MEASURES:
        _spread_into(found, name, gaps if name == "itl" else [of[name] for of in every if name in of])
    _spread_into(found, "ttft_sent", [record.heard_ns[0] - record.sent_ns for record in finished])
    _spread_into(found, "e2el_sent", [record.heard_ns[-1] - record.sent_ns for record in finished])
    _spread_into(
        found, "send_delay", [record.sent_ns - record.due_ns for record in records if record.sent_ns]
    )
    timings = [record.answer["timing_ms"] for record in finished if "timing_ms" in record.answer]
    found["server_mean_ms"] = {
        part: round(sum(timing[part] for timing in timings) / len(timings), 3) if timings else 0.0
        for part in ("queue", "transfer", "prefill", "ttft", "total")
    }
    return found


def _spread_into(found: dict[str, Any], name: str, values: Sequence[int]) -> None:
    of = spread(values)
    for field in Percentiles.__struct_fields__:
        found[f"{field}_{name}_ms"] = getattr(of, field)


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each request by itself, ms from the first one's time; for `--save`."""
    first_ns = records[0].due_ns if records else 0

    def ms(at_ns: int) -> float | None:
        return round((at_ns - first_ns) / MS_NS, 3) if at_ns else None

    return [
        {
            "request_id": str(record.answer.get("id", "")).removeprefix("cmpl-"),
            "due_ms": ms(record.due_ns),
            "sent_ms": ms(record.sent_ns),
            "tokens_ms": [ms(heard) for heard in record.heard_ns],
            "outcome": record.outcome or "open",
            "reason": record.reason,
            "prompt_tokens": record.prompt_tokens or record.planned.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
        }
        for record in records
    ]


def table(found: dict[str, Any]) -> str:
    """For a person, in the form that serving benchmarks have."""
    lines = [] if found["complete"] else ["INTERRUPTED: what had happened until then"]
    lines += [*found["notes"], f"{' Serving Benchmark Result ':=^64}"]

    def line(name: str, value: Any) -> None:
        lines.append(f"{name + ':':<48}{value:<16}".rstrip())

    def number(name: str, value: float) -> None:
        line(name, f"{value:.2f}")

    line("Successful requests", found["completed"])
    line("Failed requests", found["failed"])
    for reason, count in found["errors"].items():
        line(f"  {reason}", count)
    line("Rejected requests", sum(found["rejected"].values()))
    for reason, count in found["rejected"].items():
        line(f"  {reason}", count)
    if found["open"]:
        line("Still open", found["open"])
    number("Benchmark duration (s)", found["duration"])
    line("Total input tokens", found["total_input_tokens"])
    share = found["cached_tokens"] / max(1, found["total_input_tokens"])
    line("  of them cached", f"{found['cached_tokens']} ({share:.1%})")
    line("Total generated tokens", found["total_output_tokens"])
    number("Request throughput (req/s)", found["request_throughput"])
    if found["slo_ms"]:
        slo = " and ".join(f"{name} <= {limit:g} ms" for name, limit in found["slo_ms"].items())
        number("Request goodput (req/s)", found["request_goodput"])
        line("  share of all requests", f"{found['goodput_share']:.1%} ({slo})")
    number("Output token throughput (tok/s)", found["output_throughput"])
    number("Total token throughput (tok/s)", found["total_token_throughput"])
    for name, title in MEASURES.items():
        lines.append(f"{title:-^64}")
        for field in Percentiles.__struct_fields__:
            number(f"{field[:1].upper()}{field[1:]} {name.upper()} (ms)", found[f"{field}_{name}_ms"])
    lines.append(f"{'From when it was sent, not from when it was due':-^64}")
    number("Mean TTFT (ms)", found["mean_ttft_sent_ms"])
    number("P99 TTFT (ms)", found["p99_ttft_sent_ms"])
    number("P99 of being sent late (ms)", found["p99_send_delay_ms"])
    lines.append("=" * 64)
    return "\n".join(lines)
