"""`halfmoon replay --explain`: every candidate of every placement of a request, and its later history beside it."""

from __future__ import annotations

from typing import Any

from halfmoon.conductor.core.admission import Placement, Refusal
from halfmoon.conductor.core.explanation import Explanation, RoleGrounds
from halfmoon.conductor.core.placement.measures import Candidate, MixedCandidate
from halfmoon.conductor.replay.histories import MoveHistory, PlacementAttempt, RequestHistory
from halfmoon.conductor.replay.reasons import (
    decode_reasons,
    mixed_reasons,
    prefill_reasons,
    way_reason,
    workers_text,
)
from halfmoon.conductor.replay.text import clock, duration
from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.events import RequestFinished
from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.roles import ROLES, WorkerRole
from halfmoon.schemas.similar import Reference, ReferencePart
from halfmoon.schemas.types import KEY_BYTES

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
    for move in history.moves:
        lines += ["", *moved(move)]
    lines += ["", _ended(history)]
    return "\n".join(lines)


def _decided(why: Explanation, attempt: PlacementAttempt | None) -> list[str]:
    prefill_id, decode_id = chosen(why.verdict)
    lines = [heading(why), verdict_text(why)]
    lines += ["", *table(prefill_rows(why, prefill_id, attempt))]
    if why.decode:
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
            if why.verdict.mixed:
                return f"placed on {prefill_id}, which prefills and decodes"
            if not decode_id:
                return f"placed on {prefill_id}, whose first token is the whole answer"
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
    found += [
        f"{c.worker_id}: of a step, {duration(c.waits_ns)} wait for attention elsewhere"
        + (f", in {c.groups} group{'s' * (c.groups > 1)}" if c.groups else "")
        for c in why.decode
        if c.waits_ns
    ]
    found += [_corrected(worker_id, *correction) for worker_id, correction in why.corrections.items()]
    if isinstance(why.verdict, Placement) and why.corrections:
        predicted = f"predicted: first token {duration(why.verdict.predicted.ttft_ns)}"
        if chosen(why.verdict)[1]:
            longest = duration(why.verdict.predicted.tbt_ns)
            predicted += f"; between tokens {longest}, the longest intervals in the batch that will be"
        found.append(predicted)
    taken = chosen(why.verdict)[0]
    reasons = mixed_reasons(why, taken)
    found += [f"{mixed_line(c, taken)}; {reasons[c.worker_id]}" for c in why.mixed]
    found += [reason] if (reason := way_reason(why)) else []
    if isinstance(why.verdict, Placement) and why.verdict.prefill.group_ns:
        found.append(group_line(why.verdict.prefill))
    if isinstance(why.verdict, Placement) and why.verdict.prefill.reference is not None:
        found.append(reference_line(why.verdict.prefill.reference, attempt))
    if attempt is not None and attempt.order.before:
        found.append(
            f"computed before those that wait there from order {attempt.order.before} on: they take longer"
        )
    pairs: dict[tuple[str, str], list[str]] = {}
    for name, pair in why.rivals.items():
        pairs.setdefault(pair, []).append(name)
    found += [
        f"{workers_text(*pair)}: taken under policy {', '.join(names)}" for pair, names in pairs.items()
    ]
    if attempt is not None and attempt.finished is not None and is_mixed(why.verdict):
        done = attempt.finished
        found.append(
            f"happened: first token {duration(done.ttft_ns)}, {duration(done.tbt_ns)} between tokens, "
            f"{done.completion_tokens} tokens in {duration(done.decode_ns)}"
        )
    held = dict.fromkeys(place.worker_id for place in _cache_of(why.verdict))
    for worker_id, (free, blocks) in why.attention.items():
        found.append(
            f"{worker_id}: {'holds the KV, ' if worker_id in held else ''}{free} of {blocks} blocks were free"
        )
    found += [
        f"{worker_id}: slow, and avoided for new KV: {duration(waited_ns)} of a step, where {duration(expected_ns)} "
        "were measured"
        for worker_id, (waited_ns, expected_ns) in why.slow.items()
    ]
    if attempt is not None and attempt.lost:
        found.append(f"given up after {duration(attempt.end_ns - attempt.at_ns)}: {attempt.lost}")
    return found


def _corrected(worker_id: str, role: WorkerRole, permille: int, neighbours: int) -> str:
    steps = ROLES[role].duties == {"batch"}
    beside = "" if steps else f", beside {neighbours} busy neighbour{'s' * (neighbours != 1)}"
    done = "steps" if steps else "prefills"
    return f"{worker_id}: its last {done} took {permille / 1_000:.2f} times what was fitted{beside}; predicted so"


def group_line(c: Candidate) -> str:
    """Workers and their layers of a prompt, and its time on fewer workers or more, in words."""
    times = "; ".join(
        f"{duration(ns)} on {count} worker{'s' * (count > 1)}" for count, ns in enumerate(c.group_ns, 1)
    )
    if not c.stages:
        return f"{c.worker_id} computes it alone: prefill {times}"
    parts = ", ".join(
        f"{one.worker_id} layers {one.first_layer} to {one.first_layer + one.layers - 1}" for one in c.stages
    )
    return f"computed together, in chunks of {c.chunk_tokens} tokens: {parts}; prefill {times}"


def _piece(part: ReferencePart) -> str:
    blocks = len(part.block_keys) // KEY_BYTES
    return f"{blocks} {'blocks' if blocks > 1 else 'block'} at {part.node_id}"


def reference_line(reference: Reference, attempt: PlacementAttempt | None) -> str:
    """The similar prompt that stands in, or the documents, and what came of it, in words."""
    pieces = ", ".join(_piece(part) for part in reference.parts)
    if reference.named:
        line = (
            f"KV of documents stands in: {pieces}; {reference.resemblance} % of the tokens behind the prefix"
        )
    else:
        line = f"KV of a similar prompt stands in: {pieces}, {reference.resemblance} % of its runs of tokens in common"
    if attempt is None or attempt.prefilled is None:
        return line
    reuse = attempt.prefilled.similar
    if reuse is None:
        return f"{line}; it was not used: the prompt was computed whole"
    kept = f"; each layer keeps {reuse.retained_tokens} tokens of the prompt" if reuse.retained_tokens else ""
    return (
        f"{line}; for {reuse.tokens} tokens, {reuse.computed_tokens} computed on the mean over layers{kept}"
    )


def is_mixed(verdict: Placement | Refusal | None) -> bool:
    """One mixed worker has both halves."""
    return isinstance(verdict, Placement) and verdict.mixed


def mixed_line(c: MixedCandidate, chosen: str) -> str:
    """The cost of a request at a mixed worker, in words."""
    prefill, decode = c.prefill, c.decode
    return (
        f"{'> ' if c.worker_id == chosen else ''}{c.worker_id}, mixed: first token {duration(prefill.ttft_ns)} (queue "
        f"{duration(prefill.queue_ns)}, transfer {duration(prefill.transfer_ns)}, prefill beside its decodes "
        f"{duration(prefill.prefill_ns)}, {prefill.cached_tokens} tokens cached), {duration(decode.tbt_ns)} between "
        f"tokens beside {decode.sequences} others; {decode.blocks} KV blocks, {decode.reserved_blocks} reserved"
        + ("" if decode.room else " (no room)")
    )


def _cache_of(verdict: Placement | Refusal | None) -> list[KvPart]:
    return verdict.decode.cache if isinstance(verdict, Placement) else []


def prefill_rows(why: Explanation, chosen: str, attempt: PlacementAttempt | None) -> list[tuple[str, ...]]:
    """A heading, a row for each candidate, and below the `chosen` one its measured times."""
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
                f"{c.cached_tokens}" + (f" ({c.coming_blocks} blocks coming)" if c.coming_blocks else ""),
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


def lent(loan: KvPart) -> str:
    """A part that another worker holds, in words."""
    return f"{loan.segments} {'segments' if loan.segments > 1 else 'segment'} at {loan.worker_id}"


def held_at(place: KvPart, blocks: int) -> str:
    """A place that holds KV of a request of `blocks` blocks, in words."""
    if place.segments or place.first_segment:
        last = place.first_segment + place.segments - 1
        if last < place.first_segment:
            return f"the rest at {place.worker_id}, from segment {place.first_segment} on"
        these = f"segments {place.first_segment} to {last}" if place.segments > 1 else f"segment {last}"
        return f"{these} at {place.worker_id}"
    named = place.heads(place.kv_heads or 0)
    first, last = named.start, named.stop - 1
    heads = f"heads {first} to {last}" if last > first else f"head {first}"
    return f"{blocks} at {place.worker_id}, {heads}"


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
                " + ".join(
                    [f"{c.blocks}", *map(lent, c.loans), *(held_at(one, c.cache_blocks) for one in c.cache)]
                ),
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


def moved(move: MoveHistory) -> list[str]:
    """The grounds of a move, and its later history, in words."""
    why = move.grounds
    room = f"{why.waiting} waiting for room" if not why.proactive else "one more that may come"
    lines = [
        f"event {why.seq}, {clock(why.at_ns)}: {why.segments} "
        f"{'segments' if why.segments > 1 else 'segment'} ({why.tokens} tokens) to move from {why.owner_id} to "
        f"{why.lender_id}",
        f"  {why.owner_id}: a batch of {why.batch}, {why.owner_use} % of its cache reserved, {room}; with the move "
        f"{why.joining} more can join",
        f"  {why.lender_id}: {why.lender_use} % reserved"
        + "".join(f"; {worker_id}: {use} %, passed over" for worker_id, use in why.others.items()),
        f"  of a step, attention at {why.lender_id} takes {duration(why.away_ns)}, hidden behind "
        f"{duration(why.own_ns)} at {why.owner_id}",
        f"  tokens a second of both: {why.rate_before / 1e3:.1f}, with the move {why.rate_after / 1e3:.1f}",
    ]
    took = duration(move.end_ns - why.at_ns) if move.end_ns else ""
    if move.refused:
        lines.append(f"  given up after {took}: {move.refused}")
    elif took:
        lines.append(f"  moved in {took}: {move.moved_bytes:,} bytes")
    else:
        lines.append("  not answered")
    return lines


def role_changed(why: RoleGrounds) -> str:
    """Why a worker took another role by load, or should, in words."""
    how = "is advised to become" if why.advised else "becomes"
    lines = [
        f"event {why.seq}, {clock(why.at_ns)}: {why.worker_id}, a {why.role} worker, {how} a {why.becomes} worker",
        f"  in {duration(why.window_ns)} {why.requests} requests: prompts of {duration(why.prefill_ns)}, answers of "
        f"{why.answer_tokens} tokens; so for {duration(why.held_ns)}",
    ]
    for role, workers in why.workers.items():
        lines.append(
            f"  {role}: {why.arriving[role] / 1e3:.2f} workers for what arrives, {why.present[role] / 1e3:.2f} for "
            f"what is there; {workers} are {why.load_before[role] / 10:.0f} % full, then "
            f"{why.load_after[role] / 10:.0f} %"
        )
    others = "".join(f"; {name}: in {duration(ns)}" for name, ns in why.others.items())
    lines.append(f"  it has finished what it has in {duration(why.done_ns)}{others}")
    return "\n".join(lines)


def _ended(history: RequestHistory) -> str:
    took = f" after {duration(history.end_ns - history.arrived_ns)}" if history.end_ns else ""
    match history.ending:
        case "open":
            return "not ended by the end of the log"
        case "finished":
            assert history.finished is not None
            done = history.finished
            return f"finished{took} ({done.finish_reason}): {done.completion_tokens} tokens, {answer_times(done)}"
        case _:
            return f"{history.ending}{took}: {history.reason or 'no reason was given'}"


def answer_times(done: RequestFinished) -> str:
    """A single token has none before it."""
    first = f"first token {duration(done.ttft_ns)}"
    return first if done.completion_tokens == 1 else f"{first}, between tokens {duration(done.tbt_ns)}"


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
    """Each decision on a request in words: rows are (class, cells), the chosen one `won`, its later history `then`."""
    orders = {attempt.seq: attempt for attempt in history.attempts}
    rows = [_why(why, orders.get(why.seq)) for why in history.why]
    if rows:
        rows[-1]["more"] += [line.strip() for move in history.moves for line in moved(move)]
    return rows


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
