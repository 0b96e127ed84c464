"""Workloads that policies are compared on: recorded agents' sessions, the papers' conversation trace, and six kinds
that are drawn.

Each is a list of some thousand arrivals; those that are drawn keep up to a fifth of eight prefill workers of a 70B
model busy at speed 1. `seed` draws them, and says which half of the conversation trace it is.

Sources: the sessions are those of github.com/callanjfox/kv-cache-tester (Apache-2.0), see benchmarks/traces/README.md;
the conversation trace is Mooncake's (FAST'25).

    python benchmarks/workloads.py KIND [SEED]      the arrivals as a trace, which `halfmoon simulate` and `bench` read
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import zstandard

from halfmoon.conductor.simulation.trace import Arrival, ordered, read_trace
from halfmoon.schemas.numbers import MS_NS, SECOND_NS
from halfmoon.schemas.types import KEY_BYTES

BLOCK = 512
TRACES = Path(__file__).parent / "traces"
SESSIONS = TRACES / "agent_sessions.jsonl.zst"
#: A session ends before its first prompt that is longer: 8 + 8 workers hold no more of many such.
LONGEST = 120_000
#: A person went away; what comes after belongs to another hour.
PAUSE_S_MAX = 600.0
#: The recorder saw a streamed and a plain copy of one request.
COPY_S = 3.0


class Texts:
    """Names for blocks: a text is a chain of them, and two texts share the blocks that both have by the same name."""

    def __init__(self) -> None:
        self._names: dict[tuple[object, ...], int] = {}

    def key(self, *name: object) -> bytes:
        return self._names.setdefault(name, len(self._names) + 1).to_bytes(KEY_BYTES, "big")

    def chain(self, text: object, tokens: int, first: int = 0) -> bytes:
        """Keys of the whole blocks of a text of `tokens`, from block `first` on."""
        return b"".join(self.key(text, place) for place in range(first, tokens // BLOCK))


# --- recorded -----------------------------------------------------------------------------------------------


class _Turn(msgspec.Struct):
    t: float
    ids: list[tuple[int, int]] | None = None
    tokens: int = msgspec.field(name="in", default=0)
    out: int = 0
    #: Seconds until its answer was whole.
    api: float = 0.0


class _Session(msgspec.Struct):
    requests: list[_Turn]


def recorded_agents(seed: int, sessions: int = 150, length_s: float = 7_200.0) -> list[Arrival]:
    """Sessions of people who worked with a coding agent, begun at random times; pauses are cut at ten minutes."""
    draw = random.Random(seed)
    with SESSIONS.open("rb") as file:
        stream = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file)
        lines = io.TextIOWrapper(stream, encoding="utf-8").read().splitlines()
    decoder = msgspec.json.Decoder(_Session)
    drawn = [decoder.decode(line) for line in lines]
    draw.shuffle(drawn)
    texts, made = Texts(), list[Arrival]()
    for number, session in enumerate(drawn[:sessions]):
        begun_s, last, ended_s = draw.random() * length_s, -1, 0.0
        for turn, at_s in _turns(session):
            if begun_s + at_s > length_s:
                break
            ids = [one for first, count in turn.ids or () for one in range(first, first + count)]
            # Recorded blocks have 64 tokens; eight of them name one of ours.
            keys = [texts.key(number, *ids[at : at + 8]) for at in range(0, len(ids) - 7, 8)]
            keys = keys[: turn.tokens // BLOCK]
            made.append(
                Arrival(
                    at_ns=int((begun_s + at_s) * SECOND_NS),
                    prompt_tokens=turn.tokens,
                    output_tokens=turn.out,
                    block_keys=b"".join(keys),
                    max_tokens=max(2_048, turn.out),
                    follows=last,
                    think_ns=_think_ns(at_s - ended_s) if last >= 0 else 0,
                )
            )
            last, ended_s = len(made) - 1, at_s + turn.api
    return ordered(made)


def _turns(session: _Session) -> Iterator[tuple[_Turn, float]]:
    """Requests of a session with their times since it began, s."""
    last: _Turn | None = None
    cut_s = before_s = 0.0
    for turn in session.requests:
        if not turn.ids or not turn.tokens or not turn.out:
            continue
        if turn.tokens > LONGEST:
            return
        if last is not None and turn.ids == last.ids and turn.t - last.t < COPY_S:
            continue
        cut_s += max(0.0, turn.t - before_s - PAUSE_S_MAX)
        before_s, last = turn.t, turn
        yield turn, turn.t - cut_s


def conversation(seed: int) -> list[Arrival]:
    """Mooncake's hour of a chat service: the first half of it at an even seed, the second at an odd one."""
    arrivals = read_trace(TRACES / "conversation_trace.jsonl.zst")
    half = len(arrivals) // 2
    part = arrivals[half:] if seed % 2 else arrivals[:half]
    return ordered([msgspec.structs.replace(one, at_ns=one.at_ns - part[0].at_ns) for one in part])


# --- drawn --------------------------------------------------------------------------------------------------


def chat(seed: int, texts: Texts | None = None) -> list[Arrival]:
    """People who talk: a common system prompt, questions of some hundred tokens, a minute between them. `texts`: with
    others that their blocks are told apart from.
    """
    draw, texts, made = random.Random(seed), texts or Texts(), list[Arrival]()
    for number, begun_s in enumerate(_poisson(draw, 12.0, 200)):
        tokens, at_s, last, think_s = 1_536, begun_s, -1, 0.0
        for _ in range(1 + int(draw.expovariate(1 / 5))):
            tokens += 20 + int(draw.lognormvariate(5.0, 1.2))
            answer = 1 + min(2_000, int(draw.lognormvariate(5.5, 0.8)))
            keys = texts.chain("system", 1_536) + texts.chain(number, tokens, first=3)
            made.append(_arrival(at_s, tokens, answer, keys, follows=last, think_s=think_s))
            tokens += answer
            last, think_s = len(made) - 1, draw.expovariate(1 / 45)
            at_s += answer * 0.03 + think_s
    return ordered(made)


def retrieval(seed: int) -> list[Arrival]:
    """Questions about what a search has found: a system prompt, then three to eight of 2,000 passages, in any order."""
    draw, texts, made = random.Random(seed), Texts(), list[Arrival]()
    for number, at_s in enumerate(_poisson(draw, 1.6, 2_000)):
        tokens, keys = 1_024, texts.chain("system", 1_024)
        name: tuple[int, ...] = ()
        for _ in range(draw.randint(3, 8)):
            passage = min(1_999, int(draw.paretovariate(0.6)))
            name = (*name, passage)
            length = BLOCK * (2 + passage % 5)
            keys += texts.chain(name, length)
            tokens += length
        tokens += 40 + int(draw.lognormvariate(4.0, 0.7))
        keys += texts.chain(("question", number), tokens, first=len(keys) // KEY_BYTES)
        made.append(_arrival(at_s, tokens, 1 + int(draw.lognormvariate(4.8, 0.7)), keys))
    return ordered(made)


def documents(seed: int) -> list[Arrival]:
    """A long text of which nobody has asked before, and up to six questions about it within minutes."""
    draw, texts, made = random.Random(seed), Texts(), list[Arrival]()
    for number, begun_s in enumerate(_poisson(draw, 0.25, 4_000)):
        length, at_s = min(110_000, 8_000 + int(draw.lognormvariate(10.0, 0.8))), begun_s
        for asked in range(draw.choice([1, 1, 2, 3, 6])):
            tokens = length + 30 + int(draw.lognormvariate(4.0, 0.8))
            keys = texts.chain(number, length)
            keys += texts.chain((number, asked), tokens, first=len(keys) // KEY_BYTES)
            made.append(_arrival(at_s, tokens, 1 + int(draw.lognormvariate(5.3, 0.9)), keys))
            at_s += 10 + draw.expovariate(1 / 40)
    return ordered(made)


def templates(seed: int) -> list[Arrival]:
    """Programs that fill in one of sixty templates, the first ones far more often; short answers, many a second."""
    draw, texts, made = random.Random(seed), Texts(), list[Arrival]()
    for number, at_s in enumerate(_poisson(draw, 18.0, 400)):
        template = min(59, int(draw.paretovariate(0.9)) - 1)
        length = 2_048 + BLOCK * (template * 7 % 16)
        tokens = length + 50 + int(draw.lognormvariate(6.0, 0.8))
        keys = texts.chain(("template", template), length)
        keys += texts.chain(number, tokens, first=len(keys) // KEY_BYTES)
        made.append(_arrival(at_s, tokens, 1 + int(draw.lognormvariate(4.0, 0.6)), keys))
    return ordered(made)


def agents(seed: int) -> list[Arrival]:
    """Sessions that begin with one of forty lists of tools and grow by what the tools answer, some of it in forks."""
    draw, texts, made = random.Random(seed), Texts(), list[Arrival]()
    for number, begun_s in enumerate(_poisson(draw, 0.25, 1_500)):
        tools = draw.randrange(40)
        head = 4_096 + BLOCK * (tools % 24)
        tokens, at_s, fork, forked = head, begun_s, 0, head
        last, think_s = -1, 0.0
        for turn in range(1 + int(draw.expovariate(1 / 12))):
            tokens += 16 + int(draw.lognormvariate(6.8, 1.2))
            if tokens > LONGEST:
                break
            keys = texts.chain(("tools", tools), head)
            keys += texts.chain((number, 0), min(tokens, forked), first=len(keys) // KEY_BYTES)
            keys += texts.chain((number, fork), tokens, first=len(keys) // KEY_BYTES)
            answer = 1 + min(2_000, int(draw.lognormvariate(4.8, 0.9)))
            made.append(_arrival(at_s, tokens, answer, keys, follows=last, think_s=think_s))
            if fork == 0 and draw.random() < 0.08:
                fork, forked = turn + 1, tokens
            tokens += answer
            last, think_s = len(made) - 1, draw.lognormvariate(1.0, 1.4)
            at_s += answer * 0.03 + think_s
    return ordered(made)


def bursts(seed: int) -> list[Arrival]:
    """Chats, and each few minutes a batch of up to a hundred prompts about one text, all within ten seconds."""
    draw, texts = random.Random(seed), Texts()
    # A part of each conversation: who is left waits for nobody.
    made = [
        msgspec.structs.replace(one, follows=-1) for one in chat(seed + 1_000, texts) if draw.random() < 0.3
    ]
    for number, begun_s in enumerate(_poisson(draw, 1 / 20, 500)):
        length = BLOCK * draw.randint(8, 48)
        for one in range(draw.randint(20, 100)):
            tokens = length + 60 + int(draw.lognormvariate(5.5, 1.0))
            keys = texts.chain(("text", number), length)
            keys += texts.chain((number, one), tokens, first=len(keys) // KEY_BYTES)
            at_s = begun_s + draw.random() * 10
            made.append(_arrival(at_s, tokens, 1 + int(draw.lognormvariate(5.0, 0.6)), keys))
    return ordered(made)


def _poisson(draw: random.Random, rate: float, length_s: float) -> Iterator[float]:
    """Times, s: `rate` a second in the mean, for `length_s`."""
    at_s = draw.expovariate(rate)
    while at_s < length_s:
        yield at_s
        at_s += draw.expovariate(rate)


def _arrival(
    at_s: float, tokens: int, answer: int, keys: bytes, *, follows: int = -1, think_s: float = 0.0
) -> Arrival:
    """`follows`, `think_s`: in a closed loop, of the turn before."""
    return Arrival(
        at_ns=int(at_s * SECOND_NS),
        prompt_tokens=tokens,
        output_tokens=min(answer, 2_000),
        block_keys=keys,
        follows=follows,
        think_ns=_think_ns(think_s),
    )


def _think_ns(seconds: float) -> int:
    """A recorded turn may begin before the answer to the one before it is whole."""
    return int(max(0.0, seconds) * SECOND_NS)


#: Those of sessions, whose turns wait in a closed loop for the answers before them.
SESSIONS_KINDS = ("recorded agents", "chat", "agents")
KINDS: dict[str, Callable[[int], list[Arrival]]] = {
    "recorded agents": recorded_agents,
    "conversation": conversation,
    "chat": chat,
    "retrieval": retrieval,
    "documents": documents,
    "templates": templates,
    "agents": agents,
    "bursts": bursts,
}


def rows(arrivals: Sequence[Arrival]) -> Iterator[dict[str, object]]:
    """The arrivals as a trace's rows. A prompt's last block, where it is no whole one, has an id of its own."""
    sessions = list[int]()
    for place, arrival in enumerate(arrivals):
        sessions.append(sessions[arrival.follows] if arrival.follows >= 0 else place)
        keys = arrival.block_keys
        ids = [int.from_bytes(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
        own = range(len(ids), -(-arrival.prompt_tokens // BLOCK))
        row = {
            "timestamp": arrival.at_ns / MS_NS,
            "input_length": arrival.prompt_tokens,
            "output_length": arrival.output_tokens,
            "hash_ids": [*ids, *((place + 1 << 32) + block for block in own)],
        }
        if arrival.follows >= 0:
            row |= {"think_ms": arrival.think_ns / MS_NS}
        yield row | {"session_id": sessions[place]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=[*KINDS])
    parser.add_argument("seed", type=int, nargs="?", default=1)
    args = parser.parse_args()
    for row in rows(KINDS[args.kind](args.seed)):
        sys.stdout.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
