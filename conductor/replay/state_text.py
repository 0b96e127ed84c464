"""The whole state of a core at one place of the log: readable, or as plain values."""

from __future__ import annotations

from typing import Any

import msgspec

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.block_index import BlockIndex
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import Link
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.replay.explain import table
from halfmoon.conductor.replay.text import clock, duration
from halfmoon.schemas.types import KEY_BYTES

#: Most entries of a list that are named.
NAMED_MAX = 40


def plain(core: Core) -> Any:
    """Everything, as JSON can say it; block keys in hexadecimal with the nodes that hold them."""
    values = msgspec.to_builtins(core.state, enc_hook=_index)
    return {"digest": core.digest(), **values}


def _index(value: Any) -> Any:
    assert isinstance(value, BlockIndex), value
    return {
        tier: {key.hex(): nodes for key, nodes in held.items()} for tier, held in value.holdings().items()
    }


def described(core: Core) -> str:
    """Every part of the state under a heading, the index by node; for people."""
    state = core.state
    mixed, attention = _mixed(state), _attention(state)
    parts = [
        f"after event {state.seq}, {clock(state.server_ns)}; "
        f"code {state.code_version or 'unknown'}; state {core.digest()}",
        "policy: " + " ".join(f"{name}={_value(name, value)}" for name, value in _policy(state)),
        _section("prefill workers", _prefill(state)),
        _section("decode workers", _decode(state)),
        _section("mixed workers", mixed) if mixed[1:] else "",
        _section("attention workers", attention) if attention[1:] else "",
        _section("store agents", _stores(state)),
        _section("frontends", _frontends(state)),
        _section("requests", _requests(state)),
        _section("orders", _orders(state)),
        _section("links, measured", _links(state)),
        _section("answers, by power of two of their limit", _answers(state)),
        _section("timers", _timers(state)),
        _counters(state),
    ]
    return "\n\n".join(part for part in parts if part)


def _policy(state: State) -> list[tuple[str, object]]:
    return list(msgspec.structs.asdict(state.policy).items())


def _value(name: str, value: object) -> str:
    return duration(value).replace(" ", "") if isinstance(value, int) and "_ns" in name else str(value)


def _section(title: str, rows: list[tuple[str, ...]]) -> str:
    if len(rows) < 2:
        return f"{title}: none"
    left = len(rows) - 1 - NAMED_MAX
    lines = table([("", *row) for row in rows[: NAMED_MAX + 1]])
    more = [f"  and {left} more (--json names all)"] if left > 0 else []
    return "\n".join([f"{title}: {len(rows) - 1}", *lines, *more])


def _prefill(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "worker",
            "node",
            "state",
            "orders",
            "queue",
            "blocks",
            "base",
            "a token",
            "a token²",
            "first order",
        )
    ]
    for worker in state.workers.values():
        duty, cost = worker.prompts, worker.cost
        if duty is None or worker.batch is not None:
            continue
        rows.append(
            (
                worker.worker_id,
                worker.node_id,
                _standing(state, worker),
                str(len(worker.orders)),
                duration(queue_ns(worker, state.at_ns)),
                str(duty.pending_blocks),
                duration(cost.prefill_base_ns),
                f"{cost.prefill_per_token_ps / 1e6:.2f} us",
                f"{cost.prefill_per_token2_fs / 1e6:.2f} ns",
                next(iter(worker.orders), "-"),
            )
        )
    return rows


def _decode(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "worker",
            "node",
            "state",
            "orders",
            "KV reserved",
            "of",
            "context",
            "base",
            "a sequence",
            "a context token",
        )
    ]
    for worker in state.workers.values():
        duty, cost = worker.batch, worker.cost
        if duty is None or worker.prompts is not None:
            continue
        rows.append(
            (
                worker.worker_id,
                worker.node_id,
                _standing(state, worker),
                str(len(worker.orders)),
                str(worker.reserved_blocks),
                str(worker.kv_blocks),
                str(duty.context_tokens),
                duration(cost.decode_base_ns),
                duration(cost.decode_per_sequence_ns),
                f"{cost.decode_per_context_token_ps / 1e3:.1f} ns",
            )
        )
    return rows


def _standing(state: State, worker: WorkerRecord) -> str:
    away = worker.block_bytes and worker.node_id not in state.stores
    return "draining" if worker.draining else "no store" if away else "ready"


def _mixed(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("worker", "node", "state", "orders", "prompts", "queue", "KV reserved", "of", "context", "budget")
    ]
    for worker in state.workers.values():
        prompts, batch = worker.prompts, worker.batch
        if prompts is None or batch is None:
            continue
        rows.append(
            (
                worker.worker_id,
                worker.node_id,
                _standing(state, worker),
                str(len(worker.orders)),
                str(len(prompts.orders)),
                duration(queue_ns(worker, state.at_ns)),
                str(worker.reserved_blocks),
                str(worker.kv_blocks),
                str(batch.context_tokens),
                str(batch.token_budget),
            )
        )
    return rows


def _attention(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("worker", "node", "state", "holds", "KV reserved", "of", "KV heads")]
    for worker in state.workers.values():
        duty = worker.holds
        if duty is None or worker.batch is not None:
            continue
        last = duty.first_kv_head + (duty.kv_heads or worker.layout.kv_heads) - 1
        rows.append(
            (
                worker.worker_id,
                worker.node_id,
                _standing(state, worker),
                str(len(duty.orders)),
                str(worker.reserved_blocks),
                str(worker.kv_blocks),
                f"{duty.first_kv_head} to {last}",
            )
        )
    return rows


def _stores(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("node", "incarnation", "blocks", "slots used", "of", "sends", "heard of", "")
    ]
    held = state.index.counts()
    for node_id, store in sorted(state.stores.items()):
        suspected = store.suspected_until_ns - state.at_ns
        rows.append(
            (
                node_id,
                store.incarnation,
                str(held.get(node_id, 0)),
                str(store.slots_used),
                str(store.slots),
                str(len(state.leaving.get(node_id, {}))),
                _ago(state, store.last_seen_ns),
                f"suspected for {duration(suspected)}" if suspected > 0 else "",
            )
        )
    return rows


def _frontends(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("frontend", "incarnation", "open requests", "heard of")]
    for name, frontend in sorted(state.frontends.items()):
        rows.append(
            (name, frontend.incarnation, str(frontend.open_requests), _ago(state, frontend.last_seen_ns))
        )
    return rows


def _ago(state: State, at_ns: int) -> str:
    return f"{duration(max(0, state.at_ns - at_ns))} ago"


def _requests(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("request", "order", "age", "tokens", "at most", "blocks", "placed", "avoids")
    ]
    for request_id, request in state.requests.items():
        event = request.event
        rows.append(
            (
                request_id,
                request.order_id or "(waits)",
                duration(state.at_ns - request.arrived_ns),
                str(event.prompt_tokens),
                str(event.max_tokens),
                str(len(event.block_keys) // KEY_BYTES),
                str(request.placements),
                ", ".join(request.avoid) or "-",
            )
        )
    return rows


def _orders(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "order",
            "request",
            "phase",
            "prefill",
            "decode",
            "age",
            "prefill ends",
            "fetches from",
            "KV reserved",
        )
    ]
    for order_id, order in state.orders.items():
        ends = order.prefill.end_ns - state.at_ns
        rows.append(
            (
                order_id,
                order.request_id,
                order.phase,
                order.prefill_id,
                order.decode_id,
                duration(state.at_ns - order.placed_ns),
                f"in {duration(ends)}" if ends > 0 else f"{duration(-ends)} ago",
                order.prefill.fetch_node_id or "-",
                str(order.decode.reserved_blocks),
            )
        )
    return rows


def _links(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("from", "to", "MB/s", "measured")]
    for tier, links in (("", state.links), (" (SSD)", state.ssd_links)):
        for destination, sources in sorted(links.items()):
            for source, link in sorted(sources.items()):
                rows.append((source + tier, destination, *_link(state, link)))
    return rows


def _link(state: State, link: Link) -> tuple[str, str]:
    return f"{link.bytes_s / 1e6:,.1f}", _ago(state, link.measured_ns)


def _answers(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("below", "seen", "mean tokens", "mean decode")]
    for kind, answers in sorted(state.answers.items()):
        mean = f"{answers.millitokens / 1e3:.1f}"
        rows.append((str(1 << kind), str(answers.count), mean, duration(answers.decode_ns)))
    return rows


def _timers(state: State) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("timer", "due")]
    rows += [(key, f"in {duration(at_ns - state.at_ns)}") for key, at_ns in sorted(state.timers.items())]
    return rows


def _counters(state: State) -> str:
    counters = state.counters
    rejected = ", ".join(f"{count} {reason}" for reason, count in sorted(counters.rejected.items())) or "none"
    return (
        f"since the log began: {counters.arrived} arrived, {counters.placed} placements, {counters.finished} finished, "
        f"{counters.failed} failed, {counters.cancelled} cancelled, rejected: {rejected}; {counters.wasted_prefills} "
        f"prefills wasted; of {counters.prompt_tokens} prompt tokens {counters.cached_local_tokens} were on the node, "
        f"{counters.cached_fetched_tokens} on another; {state.index.blocks} blocks in the index; "
        f"{counters.moves} moves of KV while decoding ({counters.moved_tokens} tokens), "
        f"{counters.moves_refused} refused"
        + (
            f"; KV of a similar prompt stood in for {counters.similar_tokens} tokens of {counters.similar_requests}"
            if counters.similar_requests
            else ""
        )
    )
