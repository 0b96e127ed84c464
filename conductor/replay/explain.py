"""`halfmoon replay --explain`: every candidate of every placement of a request, and beside it what then
happened.
"""

from __future__ import annotations

from typing import Any

from halfmoon.conductor.core.admission import Placement, Refusal
from halfmoon.conductor.core.explanation import Explanation
from halfmoon.conductor.replay.histories import PlacementAttempt, RequestHistory
from halfmoon.conductor.replay.reasons import decode_reasons, prefill_reasons
from halfmoon.conductor.replay.text import clock, duration
from halfmoon.schemas.decisions import Fetch, Loan

PREFILL_HEADS = (
    "",
    "prefill",
    "queue",
    "transfer",
    "prefill",
    "first token",
    "copies",
    "cached",
    "fetched",
    "",
)
DECODE_HEADS = ("", "decode", "between tokens", "KV blocks", "reserved", "batch", "prefix", "")


def explained(history: RequestHistory) -> str:
    """The whole history of a request as text, for people."""
    arrived = history.arrived
    lines = [
        f"request {arrived.request_id}, event {history.seq}, {clock(history.arrived_ns)}: "
        f"{arrived.prompt_tokens} prompt tokens, at most {arrived.max_tokens} more"
        + (f", priority {arrived.priority}" if arrived.priority else "")
    ]
    orders = {attempt.seq: attempt for attempt in history.attempts}
    for why in history.why:
        lines += ["", *_decided(why, orders.get(why.seq))]
    lines += ["", _ended(history)]
    return "\n".join(lines)


def _decided(why: Explanation, attempt: PlacementAttempt | None) -> list[str]:
    prefill_id, decode_id = chosen(why.verdict)
    lines = [heading(why), verdict_text(why)]
    lines += ["", *table(prefill_rows(why, prefill_id, attempt))]
    lines += ["", *table(decode_rows(why, decode_id, attempt))]
    told = [f"  {remark}" for remark in remarks(why, attempt)]
    return [*lines, "", *told] if told else lines


def heading(why: Explanation) -> str:
    """The decision's place in the log, and the rules it was made under."""
    again = f" ({why.lost_reason})" if why.lost_reason else ""
    return (
        f"event {why.seq}, {clock(why.at_ns)}{again}; policy {why.policy}, admission {why.admission}; SLO: first token "
        f"{duration(why.ttft_slo_ns)}, between tokens {duration(why.tbt_slo_ns)}; expected answer: "
        f"{why.answer_tokens} tokens"
    )


def verdict_text(why: Explanation) -> str:
    match why.verdict:
        case Placement():
            prefill_id, decode_id = chosen(why.verdict)
            return f"placed on {prefill_id} and {decode_id}"
        case Refusal(reason=reason, message=message, retry_after_ns=later_ns):
            later = f"; come back in {duration(later_ns)}" if later_ns else ""
            return f"refused, {reason}: {message}{later}"
        case None:
            return "no worker could take it: it waits"


def chosen(verdict: Placement | Refusal | None) -> tuple[str, str]:
    """Prefill and decode worker; empty when there are none."""
    return (
        (verdict.prefill.worker_id, verdict.decode.worker_id) if isinstance(verdict, Placement) else ("", "")
    )


def remarks(why: Explanation, attempt: PlacementAttempt | None) -> list[str]:
    """Workers that could not be chosen, and how the placement came to nothing."""
    found = [f"{worker_id}: left out, {reason}" for worker_id, reason in why.left_out.items()]
    if attempt is not None and attempt.lost:
        found.append(f"given up after {duration(attempt.end_ns - attempt.at_ns)}: {attempt.lost}")
    return found


def prefill_rows(why: Explanation, chosen: str, attempt: PlacementAttempt | None) -> list[tuple[str, ...]]:
    """A heading, a row for each candidate, and below the `chosen` one what happened."""
    reasons = prefill_reasons(why, chosen)
    rows: list[tuple[str, ...]] = [PREFILL_HEADS]
    for c in why.prefill:
        rows.append(
            (
                ">" if c.worker_id == chosen else "",
                c.worker_id,
                duration(c.queue_ns),
                duration(c.transfer_ns),
                duration(c.prefill_ns),
                duration(c.ttft_ns),
                duration(c.copies_ns),
                f"{c.cached_tokens}",
                fetched(c.fetches, c.fetch_sharing, c.from_ssd),
                reasons.get(c.worker_id, ""),
            )
        )
        if c.worker_id == chosen and attempt is not None and attempt.prefilled is not None:
            then = attempt.prefilled
            # Loading overlaps with waiting and computing.
            whole = attempt.finished.ttft_ns if attempt.finished else then.queue_ns + then.compute_ns
            cached = then.cached_local_tokens + then.cached_fetched_tokens
            moved = (
                f"{then.cached_fetched_tokens} tokens of {then.fetch_node_id}" if then.fetch_node_id else "-"
            )
            rows.append(
                (
                    "",
                    "  happened",
                    duration(then.queue_ns),
                    duration(then.transfer_ns),
                    duration(then.compute_ns),
                    duration(whole),
                    "",
                    f"{cached}",
                    moved,
                    f"{then.fetched_bytes:,} bytes fetched in {duration(then.fetch_ns)}, "
                    f"{then.pushed_bytes:,} pushed in {duration(then.push_ns)}",
                )
            )
    return rows


def fetched(fetches: list[Fetch], sharing: int, from_ssd: bool) -> str:
    """The blocks that are fetched and their source, in words."""
    parts = [f"{f.blocks} {'blocks' if f.blocks > 1 else 'block'} of {f.node_id}" for f in fetches]
    if parts and sharing > 1:
        parts.append(f"{sharing} transfers share it")
    if from_ssd:
        parts.append("some from SSD")
    return ", ".join(parts) or "-"


def lent(loan: Loan) -> str:
    """A part that another worker holds, in words."""
    return f"{loan.segments} {'segments' if loan.segments > 1 else 'segment'} at {loan.worker_id}"


def decode_rows(why: Explanation, chosen: str, attempt: PlacementAttempt | None) -> list[tuple[str, ...]]:
    """As `prefill_rows`."""
    reasons = decode_reasons(why, chosen)
    rows: list[tuple[str, ...]] = [DECODE_HEADS]
    for c in why.decode:
        rows.append(
            (
                ">" if c.worker_id == chosen else "",
                c.worker_id,
                duration(c.tbt_ns),
                " + ".join([f"{c.blocks}", *(lent(loan) for loan in c.loans)]),
                f"{c.reserved_blocks}" + ("" if c.room else " (no room)"),
                f"{c.sequences}",
                f"{c.prefix_blocks}",
                reasons.get(c.worker_id, ""),
            )
        )
        if c.worker_id == chosen and attempt is not None and attempt.finished is not None:
            then = attempt.finished
            rows.append(
                (
                    "",
                    "  happened",
                    duration(then.tbt_ns),
                    "",
                    "",
                    "",
                    "",
                    f"{then.completion_tokens} tokens in {duration(then.decode_ns)}, "
                    f"the batch was joined {duration(attempt.wait_ns)} after prefill",
                )
            )
    return rows


def _ended(history: RequestHistory) -> str:
    took = f" after {duration(history.end_ns - history.arrived_ns)}" if history.end_ns else ""
    match history.ending:
        case "open":
            return "not ended by the end of the log"
        case "finished":
            assert history.finished is not None
            done = history.finished
            return (
                f"finished{took} ({done.finish_reason}): {done.completion_tokens} tokens, first token "
                f"{duration(done.ttft_ns)}, between tokens {duration(done.tbt_ns)}"
            )
        case _:
            return f"{history.ending}{took}: {history.reason or 'no reason was given'}"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns aligned: the first two and the last to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell if column == last else cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def decided_rows(history: RequestHistory) -> list[dict[str, Any]]:
    """Each decision on a request in words: rows are (class, cells), the chosen one `won`, what then came `then`."""
    orders = {attempt.seq: attempt for attempt in history.attempts}
    return [_why(why, orders.get(why.seq)) for why in history.why]


def _why(why: Explanation, attempt: PlacementAttempt | None) -> dict[str, Any]:
    chosen_prefill, chosen_decode = chosen(why.verdict)
    prefill = prefill_rows(why, chosen_prefill, attempt)[1:]
    decode = decode_rows(why, chosen_decode, attempt)[1:]
    return {
        "head": heading(why),
        "verdict": verdict_text(why),
        "refused": not isinstance(why.verdict, Placement),
        "prefill": [_row(row) for row in prefill],
        "decode": [_row(row) for row in decode],
        "more": remarks(why, attempt),
    }


def _row(row: tuple[str, ...]) -> tuple[str, list[str]]:
    happened = row[1].startswith(" ")
    name = "won" if row[0] else "then" if happened else ""
    return name, [row[1].strip(), *row[2:]]
