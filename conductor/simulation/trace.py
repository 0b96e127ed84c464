"""Traces: requests with their times, lengths and blocks, as JSON Lines.

The form is Mooncake's: `{"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [...]}`; an id
names a block of 512 tokens and all before it, and the last one may be a partial block. Two more are read: without
`hash_ids` (nothing is shared), and with `session_id`, where a turn begins with the whole session so far. A row with
`session_id` and `think_ms` waits, in a closed loop, for the answer to the row before it of its session, and then for
`think_ms`: a tool runs, or a person reads.

Source: Mooncake (FAST'25), section 4, for the form and for the conversation trace.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from halfmoon.schemas.numbers import MS_NS
from halfmoon.schemas.similar import NamedDocument

#: Tokens of a block that an id names, in Mooncake's traces.
TRACE_BLOCK_TOKENS = 512
#: No prompt is longer: a length beyond is taken for a fault of the file.
TOKENS_MAX = 10_000_000
#: The limit on answers that requests without one are sent with; the longest of Mooncake's traces has 2,000
#: tokens.
MAX_TOKENS = 2_048


class TraceInvalid(ValueError):
    """A trace that cannot be replayed; the text names file and line."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request, from any source: the conductor's knowledge of it, and the length of its answer.

    `max_tokens` is the limit that the conductor sees; it does not see `output_tokens`.
    """

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = MAX_TOKENS
    #: 16-byte keys of the prompt's whole blocks, concatenated.
    block_keys: bytes = b""
    priority: int = 0
    tenant: str = ""
    #: Where KV of a similar prompt may stand in (`halfmoon.schemas.similar`).
    sketch: bytes = b""
    documents: list[NamedDocument] = []
    #: 0: by the policy.
    ttft_slo_ns: int = 0
    tbt_slo_ns: int = 0
    #: In a closed loop it comes `think_ns` after the end of the arrival at this place of the list, an earlier one, and
    #: `at_ns` does not count; -1: at `at_ns`.
    follows: int = -1
    think_ns: int = 0


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    session_id: str | int | None = None
    priority: int = 0
    think_ms: float | None = None


_decoder = msgspec.json.Decoder(_Row)


def read_trace(path: str | Path, *, block_tokens: int = TRACE_BLOCK_TOKENS) -> list[Arrival]:
    """The requests of a file (`.gz` and `.zst` by its name), with keys for blocks of `block_tokens`.

    `block_tokens` must divide 512 where the trace names blocks. Raises TraceInvalid for a line that is malformed or out
    of order, OSError for a file that cannot be read.
    """
    with _open(Path(path)) as file:
        return list(parse(file, str(path), block_tokens))


def _open(path: Path) -> BinaryIO | io.BufferedReader:
    raw = path.open("rb")
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, closefd=True))
    return raw


def parse(lines: Iterable[bytes], name: str, block_tokens: int) -> Iterator[Arrival]:
    """The requests in `lines`; `name` is for messages."""
    if TRACE_BLOCK_TOKENS % block_tokens:
        raise TraceInvalid(f"{name}: blocks of {TRACE_BLOCK_TOKENS} tokens cannot be cut into {block_tokens}")
    last_ms, number, found = 0.0, 0, False
    sessions: dict[str, tuple[int, int]] = {}
    #: Place of each session's newest row.
    newest: dict[str, int] = {}
    place = 0
    numbered = enumerate(lines, 1)
    while True:
        try:
            number, line = next(numbered, (0, b""))
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as problem:
            raise TraceInvalid(f"{name}: after line {number}: {problem}") from None
        if not number:
            break
        if not line.strip():
            continue
        row = _row(line, name, number)
        if row.timestamp < last_ms:
            raise TraceInvalid(
                f"{name}:{number}: timestamp {row.timestamp:g} is before {last_ms:g}: not in order"
            )
        last_ms, found = row.timestamp, True
        session = str(row.session_id)
        follows = newest.get(session, -1) if row.think_ms is not None else -1
        newest[session], place = place, place + 1
        yield Arrival(
            at_ns=int(row.timestamp * MS_NS),
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            max_tokens=max(MAX_TOKENS, row.output_length),
            block_keys=_keys(row, number, block_tokens, sessions),
            priority=row.priority,
            follows=follows,
            think_ns=int((row.think_ms or 0) * MS_NS) if follows >= 0 else 0,
        )
    if not found:
        raise TraceInvalid(f"{name}: holds no request")


def _row(line: bytes, name: str, number: int) -> _Row:
    try:
        row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise TraceInvalid(f"{name}:{number}: {problem}") from None
    for field, value, least, most in (
        ("timestamp", row.timestamp, 0, 10**14),
        ("input_length", row.input_length, 1, TOKENS_MAX),
        ("output_length", row.output_length, 1, TOKENS_MAX),
        ("priority", row.priority, -1_000, 1_000),
        ("think_ms", row.think_ms or 0, 0, 10**14),
    ):
        if not least <= value <= most:
            found = f"{value:g}" if abs(value) < 10**300 else "beyond all numbers"
            raise TraceInvalid(f"{name}:{number}: {field} {found} is not within {least} to {most}")
    if row.think_ms is not None and row.session_id is None:
        raise TraceInvalid(f"{name}:{number}: think_ms: there is no session_id whose answer it could follow")
    if row.hash_ids is not None:
        needed = -(-row.input_length // TRACE_BLOCK_TOKENS)
        if len(row.hash_ids) != needed:
            raise TraceInvalid(
                f"{name}:{number}: hash_ids names {len(row.hash_ids)} blocks, {row.input_length} tokens are {needed}"
            )
        if len(set(row.hash_ids)) < needed:
            raise TraceInvalid(
                f"{name}:{number}: hash_ids names a block twice: an id is of a block and all before it"
            )
        if min(row.hash_ids) < 0 or max(row.hash_ids) >= 2**63:
            raise TraceInvalid(f"{name}:{number}: hash_ids: ids are integers from 0 to 2^63 - 1")
    return row


def _keys(row: _Row, number: int, block_tokens: int, sessions: dict[str, tuple[int, int]]) -> bytes:
    """Keys need not be hashes here, only names: 8 bytes of the id (or session), 8 of the place."""
    whole = row.input_length // block_tokens
    if row.hash_ids is not None:
        parts = TRACE_BLOCK_TOKENS // block_tokens
        if parts == 1:
            return b"".join([block.to_bytes(16, "big") for block in row.hash_ids[:whole]])
        tails = [part.to_bytes(8, "big") for part in range(parts)]
        heads = [block.to_bytes(8, "big") for block in row.hash_ids]
        return b"".join([head + tail for head in heads for tail in tails][:whole])
    if row.session_id is None:
        return _chain(2 * number, whole)
    # A turn repeats the session as far as it is that long, and adds to it. A shorter prompt begins a new text.
    text, said = sessions.get(str(row.session_id), (2 * number + 1, 0))
    if row.input_length < said:
        text = 2 * number + 1
    sessions[str(row.session_id)] = (text, row.input_length + row.output_length)
    return _chain(text, whole)


def _chain(name: int, blocks: int) -> bytes:
    return b"".join([name.to_bytes(8, "little") + place.to_bytes(8, "big") for place in range(blocks)])


def faster(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """The same requests, `speed` times as fast; pauses after answers are as much shorter."""
    if speed == 1.0:
        return list(arrivals)
    return [
        msgspec.structs.replace(
            arrival, at_ns=int(arrival.at_ns / speed), think_ns=int(arrival.think_ns / speed)
        )
        for arrival in arrivals
    ]


def ordered(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """By time, from zero on. Each still follows whom it followed."""
    places = sorted(range(len(arrivals)), key=lambda place: arrivals[place].at_ns)
    now_at = {place: at for at, place in enumerate(places)}
    first_ns = arrivals[places[0]].at_ns if places else 0
    return [
        msgspec.structs.replace(
            arrivals[place],
            at_ns=arrivals[place].at_ns - first_ns,
            follows=now_at.get(arrivals[place].follows, -1),
        )
        for place in places
    ]


def first_sessions(arrivals: Sequence[Arrival], sessions: int, turns: int = 0) -> list[Arrival]:
    """The first `sessions` sessions, and of each the first `turns` turns (0: all). A request that follows none begins a
    session.
    """
    #: Of each arrival, its session and how many turns come before it.
    found: list[tuple[int, int]] = []
    kept: dict[int, int] = {}
    begun = 0
    for place, arrival in enumerate(arrivals):
        if arrival.follows >= 0:
            session, before = found[arrival.follows]
            found.append((session, before + 1))
        else:
            found.append((begun, 0))
            begun += 1
        if found[-1][0] < sessions and not 0 < turns <= found[-1][1]:
            kept[place] = len(kept)
    return [
        msgspec.structs.replace(arrivals[place], follows=kept.get(arrivals[place].follows, -1))
        for place in kept
    ]


def reuse(path: str | Path, pool_tokens: int = 0) -> float:
    """Share of all prompt tokens that one cache would hold, of `pool_tokens` under LRU, or of any size (0).

    Counted as the papers' figures are: by ids, a partial last block like a whole one.
    """
    capacity = pool_tokens // TRACE_BLOCK_TOKENS
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    with _open(Path(path)) as file:
        for number, line in enumerate(file, 1):
            row = _row(line, str(path), number)
            ids = row.hash_ids or []
            run = 0
            while run < len(ids) and ids[run] in cache:
                run += 1
            hits += min(run * TRACE_BLOCK_TOKENS, row.input_length)
            total += row.input_length
            for block in reversed(ids):
                cache[block] = None
                cache.move_to_end(block)
            while capacity and len(cache) > capacity:
                cache.popitem(last=False)
    return hits / total


def copies(arrivals: Sequence[Arrival], count: int, *, beside: int = 0) -> list[Arrival]:
    """`count` requests: `beside` copies of the trace at once (0: as many as needed), and again when they have ended.

    Each copy has texts of its own. Its rate grows with the number of copies beside each other; copy k comes k
    milliseconds later. Nobody waits for another's answer.
    """
    beside = beside or -(-count // len(arrivals))
    length_ns = arrivals[-1].at_ns + beside * MS_NS
    made: list[Arrival] = []
    turn = 0
    while len(made) < count:
        for place in sorted(
            range(len(arrivals) * beside),
            key=lambda at: (arrivals[at // beside].at_ns + at % beside * MS_NS, at),
        ):
            arrival, copy = arrivals[place // beside], turn * beside + place % beside
            keys = arrival.block_keys
            if copy:
                mark = copy.to_bytes(4, "big")
                keys = b"".join([mark + keys[at + 4 : at + 16] for at in range(0, len(keys), 16)])
            at_ns = turn * length_ns + arrival.at_ns + place % beside * MS_NS
            made.append(msgspec.structs.replace(arrival, at_ns=at_ns, block_keys=keys, follows=-1))
            if len(made) == count:
                break
        turn += 1
    return made
