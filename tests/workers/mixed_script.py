"""Drives a `MixedState` by hand, and plays its shell: what is loaded, computed and stored is kept as marks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Fetch, StartMixed
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.schemas.tokens import TakeReply
from halfmoon.workers.decode.events import EngineIdled
from halfmoon.workers.machines import Deliver, Report, TakeTokens, TokensTaken, WorkerFacts
from halfmoon.workers.mixed.actions import Action, RunIteration
from halfmoon.workers.mixed.events import Event, IterationMade, MixedOrdered
from halfmoon.workers.mixed.state import MixedState
from halfmoon.workers.prefill.actions import CommitPrompt, EndOrder, PauseOrder, ReserveSlots, StartFetch
from halfmoon.workers.prefill.events import BlocksFetched, FetchFailed, PauseEnded, SlotsReserved

MS = 1_000_000
BLOCK_TOKENS = 4
LAYOUT = Layout(
    model="m",
    model_fingerprint="f",
    layers=2,
    kv_heads=1,
    head_dim=4,
    block_tokens=BLOCK_TOKENS,
    dtype="float32",
)
FAST = Layout(
    **{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__ if name != "numerics"},
    numerics="fast",
)
NULL = Layout(
    model="m",
    model_fingerprint="f",
    layers=0,
    kv_heads=0,
    head_dim=0,
    block_tokens=BLOCK_TOKENS,
    dtype="none",
)
#: A step takes 10 ms, and 1 ms more for each sequence.
PROFILE = CostProfile(decode_base_ns=10 * MS, decode_per_sequence_ns=1 * MS)


def order(
    number: int = 1, prompt: int = 10, answer: int = 3, placement: int = 1, **fields: Any
) -> StartMixed:
    """Number 1 is request r1, order 1-1, of frontend f1."""
    return StartMixed(
        order_id=f"{number}-{placement}",
        request_id=f"r{number}",
        frontend_id="f1",
        worker_id="m0",
        prompt_tokens=prompt,
        max_tokens=answer,
        placement=placement,
        **fields,
    )


def fetch(first_block: int, blocks: int) -> Fetch:
    return Fetch(node_id="n2", first_block=first_block, blocks=blocks)


def prompt_of(order_id: str, count: int) -> list[int]:
    number = int(order_id.partition("-")[0])
    return [1000 * number + i for i in range(count)]


def token_after(tokens: list[int]) -> int:
    """What the make-believe model says after a text."""
    return sum((i + 1) * token for i, token in enumerate(tokens)) % 997 + 5000


def answer_of(number: int, prompt: int, count: int) -> list[int]:
    """What a request gets, however it is served."""
    text = prompt_of(f"{number}-1", prompt)
    for _ in range(count):
        text.append(token_after(text))
    return text[prompt:]


class Script:
    """One worker. The cache and the pool hold the texts up to the end of a block (cache: of what is in it)."""

    def __init__(self, layout: Layout = LAYOUT, **fields: Any) -> None:
        own = {
            name: fields.pop(name)
            for name in ("profile", "batch_max", "budget_tokens", "iteration_ns", "prepared_max")
            if name in fields
        }
        facts: dict[str, Any] = {
            "worker_id": "m0",
            "node_id": "n1",
            "incarnation": "i",
            "layout": layout,
            "kv_blocks": 16,
            "has_store": layout.layers > 0,
        }
        self.state = MixedState(
            WorkerFacts(**{**facts, **fields}),
            **{"profile": PROFILE, "batch_max": 4, "budget_tokens": 8, "iteration_ns": 0, **own},
        )
        self.layout = layout
        self.now_ns = 0
        self.replies: dict[str, TakeReply] = {}
        #: By order, how many blocks its node has already, and the one whose text it has.
        self.present: dict[str, int] = {}
        self.like: dict[str, str] = {}
        self.todo: list[Action] = []
        self.said: list[Action] = []
        self.step: RunIteration | None = None
        #: Block of the cache: the text that its KV was computed after, token by token.
        self.cache: dict[int, list[tuple[int, ...]]] = {}
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.committed: dict[str, set[int]] = {}
        self.delivered: dict[str, list[int]] = {}
        self.steps: list[RunIteration] = []
        #: Orders whose prompts the shell says it had kept.
        self.kept: frozenset[str] = frozenset()
        #: What loading takes, of each block.
        self.load_ns = 0
        self._slots = 0
        self.hear(EngineIdled)

    def hear(self, kind: type[Any], **fields: Any) -> list[Action]:
        self.now_ns += MS
        event: Event = kind(at_ns=self.now_ns, wall_ns=self.now_ns, **fields)
        found = self.state.on(event)
        self.state.validate()
        for action in found:
            self._note(action)
        return found

    def _note(self, action: Action) -> None:
        match action:
            case RunIteration():
                assert self.step is None, "two iterations"
                self.step = action
                self.steps.append(action)
            case Deliver():
                for each in action.message.deliveries:
                    have = self.delivered.setdefault(each.request_id, [])
                    assert each.index <= len(have), ("a gap", each, have)
                    new = [token.token_id for token in each.tokens]
                    assert have[each.index :] in ([], new[: len(have) - each.index]), ("another token", each)
                    have[each.index :] = new
            case CommitPrompt():
                blocks = range(action.first_block, action.first_block + action.blocks)
                seen = self.committed.setdefault(action.order_id, set())
                assert not seen.intersection(blocks), "committed twice"
                seen.update(blocks)
            case Report() | EndOrder():
                self.said.append(action)
            case TakeTokens() | ReserveSlots() | StartFetch() | PauseOrder():
                self.todo.append(action)
            case _:
                pass

    def begin(self, given: StartMixed, present: int = 0, like: str = "", **fields: Any) -> None:
        """Orders it; its tokens and slots come when `prepare` is called. Its text is that of the order `like`."""
        self.present[given.order_id] = present
        self.like[given.order_id] = like or given.order_id
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        text = prompt_of(like or given.order_id, given.prompt_tokens)
        ends = range(BLOCK_TOKENS - 1, len(text), BLOCK_TOKENS)
        keys = b"".join(text[end].to_bytes(16) for end in ends)
        self.replies[given.order_id] = TakeReply(
            token_ids=pack_tokens(text),
            **{"block_keys": keys, "sampling": sampling, **fields},
        )
        self.hear(MixedOrdered, order=given)

    def prepare(self, which: int = 0, *, fails: bool = False) -> None:
        """Ends one of the things that were asked for."""
        match self.todo.pop(which):
            case TakeTokens(order_id=order_id):
                reply = None if fails else self.replies[order_id]
                self.hear(TokensTaken, order_id=order_id, reply=reply)
            case ReserveSlots(order_id=order_id, blocks=blocks):
                slots = [self._slots + i for i in range(blocks)]
                self._slots += blocks
                alike = [other for other, text in self.like.items() if text == self.like[order_id]]
                there = {*range(self.present[order_id])}.union(
                    *(self.committed.get(other, ()) for other in alike)
                )
                present = sorted(there.intersection(range(blocks)))
                self._fill(order_id, slots, present)
                self.hear(SlotsReserved, order_id=order_id, slots=slots, present=present)
            case StartFetch(order_id=order_id, first_block=first, blocks=count) if fails:
                self.hear(FetchFailed, order_id=order_id, reason="gone")
            case StartFetch(order_id=order_id, first_block=first, blocks=count):
                slots = self.state.requests[order_id].job.slots if order_id in self.state.requests else []
                if slots:
                    self._fill(order_id, slots, range(first, first + count))
                self.hear(
                    BlocksFetched, order_id=order_id, source_node_id="n2", moved_bytes=count, elapsed_ns=1
                )
            case PauseOrder(order_id=order_id):
                self.hear(PauseEnded, order_id=order_id)
            case other:
                raise AssertionError(other)

    def _fill(self, order_id: str, slots: list[int], blocks: Iterable[int]) -> None:
        text = prompt_of(self.like[order_id], 10_000)
        for block in blocks:
            ends = range(block * BLOCK_TOKENS + 1, (block + 1) * BLOCK_TOKENS + 1)
            self.pool[slots[block]] = [tuple(text[:end]) for end in ends]

    def compute(self, lost: tuple[str, ...] = ()) -> None:
        """Makes the iteration that is under way."""
        step, self.step = self.step, None
        assert step is not None
        decoded, first = [], []
        for load in step.loads:
            for slot, block in load.blocks:
                self.cache[block] = list(self.pool[slot])
        for chunk in step.chunks:
            if self.layout.numerics == "exact":
                assert chunk.start % BLOCK_TOKENS == 0, chunk
                assert chunk.draws or len(chunk.token_ids) % BLOCK_TOKENS == 0, chunk
            text = self._write(chunk.table, chunk.start, chunk.token_ids)
            for block, slot in chunk.stores:
                self.pool[slot] = list(self.cache[block])
            if chunk.draws:
                first.append(SampledToken(token_id=token_after(text)))
        for decode in step.decodes:
            text = self._write(decode.table, decode.position, [decode.token_id])
            if decode.draws:
                decoded.append(SampledToken(token_id=token_after(text)))
        load_ns = self.load_ns * sum(len(load.blocks) for load in step.loads)
        step_ns = (30 if step.chunks else 10) * MS + load_ns
        kept = self.kept & {chunk.sequence.order_id for chunk in step.chunks}
        self.hear(
            IterationMade,
            decoded=decoded,
            first=first,
            step_ns=step_ns,
            load_ns=load_ns,
            lost=list(lost),
            kept=kept,
        )
        self.hear(EngineIdled)

    def _write(self, table: list[int], start: int, token_ids: list[int]) -> list[int]:
        """The whole text, after its last tokens were computed on top of what the cache holds."""
        if self.layout.layers == 0:
            return [1]
        text: list[int] = []
        if start:
            text = list(self.cache[table[(start - 1) // BLOCK_TOKENS]][(start - 1) % BLOCK_TOKENS])
        assert len(text) == start, ("another's KV, or none", start, text)
        for token_id in token_ids:
            block, at = table[len(text) // BLOCK_TOKENS], len(text) % BLOCK_TOKENS
            text.append(token_id)
            self.cache[block] = [*self.cache.get(block, [])[:at], tuple(text)]
        return text

    def idle(self) -> None:
        """The shell obeys Wake."""
        if self.step is None:
            self.hear(EngineIdled)

    def advance(self) -> bool:
        """The next thing that is to be done; False: there is none."""
        if self.todo:
            self.prepare()
        elif self.step is not None:
            self.compute()
        else:
            self.idle()
            return self.step is not None
        return True

    def run(self) -> None:
        """Until nothing is left to do."""
        for _ in range(2_000):
            if not self.advance():
                return
        raise AssertionError("it does not end")

    def reports(self) -> list[str]:
        """What the log was told, in order."""
        return [type(each.event).__name__ for each in self.said if isinstance(each, Report)]
