"""The batch former: it chooses the tokens of a mixed worker's next iteration.

An iteration has rows of two kinds: one for each sequence that decodes, and chunks of prompts. Stall-free batching
takes, in this order and while its tokens and its time last:

1. every running sequence whose prompt is computed, one token each, whatever that takes;
2. running requests whose prompt is computed in part;
3. requests that wait, in the order in which they came, as room and `sequences_max` allow.

What is cached of a prompt is loaded before its first chunk, and that takes time of the iteration too: where it is more
than the time left, over several iterations.

A sequence that needs room for its next token and finds none takes it from the request that was admitted last; that one
waits again, before all others, and its KV is computed anew. No request is admitted in an iteration that took room away.

The former knows names and numbers of tokens, and is pure: the mixed worker obeys it, and so do simulated ones.

Source: Sarathi-Serve (OSDI'24, arXiv 2403.02310), algorithm 3, in the form that its text describes: as printed, a line
overwrites the batch, and the loop over waiting requests never advances.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.workers.token_budget import time_bound

NO_COST = CostProfile()


class Room(Protocol):
    """The cache, as the former asks for it."""

    def enter(self, name: str, tokens: int) -> int | None:
        """Takes room for these tokens: how many of them are cached already, fewer than all. None: no room."""

    def grow(self, name: str) -> bool:
        """Takes room for one token more of a request that is in; False when there is none."""

    def leave(self, name: str) -> None:
        """Gives up all that the request has."""


class BlockRoom:
    """Blocks of a paged cache, by number alone: a prompt's when it enters, one more as a sequence grows into it."""

    def __init__(self, blocks: int, block_tokens: int, *, spare_blocks: int = 0) -> None:
        """`spare_blocks` stay free when a request enters and others are in, so that these can grow."""
        self.blocks, self.block_tokens, self.spare_blocks = blocks, block_tokens, spare_blocks
        self.free = blocks
        self._tokens: dict[str, int] = {}

    def enter(self, name: str, tokens: int) -> int | None:
        needed = self._blocks_of(tokens)
        if needed + (self.spare_blocks if self._tokens else 0) > self.free:
            return None
        self.free -= needed
        self._tokens[name] = tokens
        return 0

    def grow(self, name: str) -> bool:
        tokens = self._tokens[name]
        more = self._blocks_of(tokens + 1) - self._blocks_of(tokens)
        if more > self.free:
            return False
        self.free -= more
        self._tokens[name] = tokens + 1
        return True

    def leave(self, name: str) -> None:
        self.free += self._blocks_of(self._tokens.pop(name))

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens `[start, start + tokens)` of one request's prompt; `last`: its next token is drawn after it."""

    name: str
    start: int
    tokens: int
    last: bool


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """Cached tokens `[start, start + tokens)` of one request's prompt, which come into the room."""

    name: str
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration: `loads` first, then all rows at once. `admitted` are new in it; `preempted` gave up their room
    before it.
    """

    decodes: tuple[str, ...] = ()
    chunks: tuple[PromptChunk, ...] = ()
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    loads: tuple[PromptLoad, ...] = ()

    @property
    def idle(self) -> bool:
        return not (self.tokens or self.loads)

    @property
    def tokens(self) -> int:
        """Rows of the linear layers."""
        return len(self.decodes) + sum(chunk.tokens for chunk in self.chunks)


@dataclass(slots=True)
class Member:
    """A request in hand: `computed` or loaded of the `tokens` that come before its next token, of which the first
    `cached` are only loaded; `drawn` since it was added.
    """

    name: str
    tokens: int
    cached: int = 0
    computed: int = 0
    drawn: int = 0

    @property
    def decodes(self) -> bool:
        return self.computed == self.tokens


class BatchFormer:
    """`add` a request, `form` an iteration, call `made` when it is over, `remove` a request that has ended. Once
    formed, an iteration is made, or the request that prevents it is removed, before the next one is formed.
    """

    def __init__(
        self,
        room: Room,
        *,
        budget_tokens: int,
        sequences_max: int,
        grain_tokens: int = 1,
        replays: bool = False,
        cost: CostProfile = NO_COST,
        iteration_ns: int = 0,
    ) -> None:
        """`budget_tokens` may be changed between two iterations; the sequences that decode may then be more.

        `grain_tokens`: chunks end at multiples of it, or with their prompt; exact numerics need whole blocks.
        `replays`: drawn tokens of a preempted request go through decode again, one by one, and not into the prompt;
        exact numerics need that too.
        `iteration_ns`: by `cost` no iteration takes longer, but for one tile of its first prompt, and of each that is
        admitted, or loading for as long; 0: the time is not bounded.
        """
        assert 0 < grain_tokens <= budget_tokens, (grain_tokens, budget_tokens)
        assert sequences_max > 0, sequences_max
        self._room = room
        self.budget_tokens, self.sequences_max, self.grain_tokens = budget_tokens, sequences_max, grain_tokens
        self.replays, self._bound = replays, time_bound(cost, iteration_ns, grain_tokens)
        #: Of the iteration that is being formed: time for further chunks, and a tile is due whatever it takes.
        self._left_ns, self._tile_due = 0, False
        self._loads: list[PromptLoad] = []
        #: Time to load a cached token, in ps; it may be changed between two iterations. 0: none, or not known.
        self.load_per_token_ps = 0
        self._waiting: deque[Member] = deque()
        #: In the order of their admission.
        self._running: dict[str, Member] = {}
        self._formed: Iteration | None = None

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(member.name for member in self._waiting)

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    @property
    def prefilling(self) -> int:
        """How many are running whose prompt is not computed yet."""
        return sum(not member.decodes for member in self._running.values())

    def progress(self, name: str) -> tuple[int, int]:
        """(tokens computed, tokens to compute before the next one is drawn) of a running request."""
        member = self._running[name]
        return member.computed, member.tokens

    def add(self, name: str, tokens: int) -> None:
        """A request whose prompt has `tokens`, which fit into an empty room with all that it will draw."""
        assert tokens > 0, (name, tokens)
        assert name not in self._running, f"{name} is in hand"
        self._waiting.append(Member(name, tokens))

    def remove(self, name: str) -> None:
        """It has ended, or was cancelled; a name that is not in hand is passed over."""
        if self._running.pop(name, None) is not None:
            self._room.leave(name)
        else:
            self._waiting = deque(member for member in self._waiting if member.name != name)

    # --- an iteration ---------------------------------------------------------------------------------------

    def form(self) -> Iteration:
        """The next iteration; an empty one where nothing can be computed."""
        assert self._formed is None, "the last iteration was not made"
        decodes, preempted = self._take_decodes()
        chunks, admitted = self._take_chunks(decodes, preempted)
        self._formed = Iteration(
            tuple(decodes), tuple(chunks), tuple(admitted), tuple(preempted), tuple(self._loads)
        )
        return self._formed

    def made(self) -> Iteration:
        """The iteration that was formed is over; requests that were removed meanwhile are passed over."""
        batch, self._formed = self._formed, None
        assert batch is not None, "no iteration was formed"
        for name in batch.decodes:
            if name in self._running:
                self._running[name].drawn += 1
        for chunk in batch.chunks:
            member = self._running.get(chunk.name)
            if member is not None:
                member.computed += chunk.tokens
                member.drawn += chunk.last
        return batch

    def _take_decodes(self) -> tuple[list[str], list[str]]:
        """(requests that decode, requests that gave up room for them)."""
        decodes: list[str] = []
        preempted: list[str] = []
        for member in list(self._running.values()):
            if not member.decodes or member.name not in self._running:
                continue
            while not self._room.grow(member.name):
                preempted.append(self._preempt())
                if preempted[-1] == member.name:
                    break
            else:
                decodes.append(member.name)
        return decodes, preempted

    def _preempt(self) -> str:
        """The request that was admitted last waits again, before all others."""
        assert len(self._running) > 1, f"{self._running} fits not even alone"
        _, member = self._running.popitem()
        self._room.leave(member.name)
        if not self.replays:
            member.tokens += member.drawn
        member.computed = member.drawn = 0
        self._waiting.appendleft(member)
        return member.name

    def _take_chunks(self, decodes: list[str], preempted: list[str]) -> tuple[list[PromptChunk], list[str]]:
        """(chunks of prompts beside the decodes, requests that are admitted)."""
        chunks: list[PromptChunk] = []
        admitted: list[str] = []
        left = max(0, self.budget_tokens - len(decodes))
        self._loads = []
        if self._bound is not None:
            context = sum(self._running[name].tokens + self._running[name].drawn for name in decodes)
            self._left_ns, self._tile_due = self._bound.beside_ns(len(decodes), context), True
        for member in self._running.values():
            if not member.decodes:
                left = self._take(member, left, chunks)
        if not preempted:
            self._take_waiting(left, chunks, admitted)
        return chunks, admitted

    def _take_waiting(self, left: int, chunks: list[PromptChunk], admitted: list[str]) -> None:
        while self._waiting and len(self._running) < self.sequences_max:
            member = self._waiting[0]
            # Nobody takes room that it does not compute for: so at most one prompt is computed in part.
            if not self._tokens(member, left):
                break
            cached = self._room.enter(member.name, member.tokens)
            if cached is None:
                break
            assert 0 <= cached < member.tokens, (member, cached)
            self._waiting.popleft()
            # What is cached makes its chunk slower than it was thought to be, and it has its room by now.
            member.cached, self._tile_due = cached, True
            self._running[member.name] = member
            admitted.append(member.name)
            left = self._take(member, left, chunks)

    def _take(self, member: Member, left: int, chunks: list[PromptChunk]) -> int:
        """The rest of the budget."""
        if member.computed < member.cached and not self._load(member):
            return 0
        tokens = self._tokens(member, left)
        if tokens:
            last = member.computed + tokens == member.tokens
            chunks.append(PromptChunk(member.name, member.computed, tokens, last))
            if self._bound is not None:
                self._left_ns -= self._bound.cost.chunk_ns(member.computed, tokens)
                self._tile_due = False
        # A budget that is too small for this one stays unused: later requests do not overtake it.
        return max(0, left - tokens) if member.computed + tokens == member.tokens else 0

    def _load(self, member: Member) -> bool:
        """As much of what is cached as there is time for; where a tile is due, as much as that one would take. Whether
        that is all of it.
        """
        tokens = member.cached - member.computed
        if self._bound is not None and self.load_per_token_ps:
            due_ns = (
                self._bound.cost.chunk_ns(member.cached, self._bound.tile_tokens) if self._tile_due else 0
            )
            within = max(due_ns, self._left_ns) * 1_000 // self.load_per_token_ps
            tokens = min(tokens, max(within, int(self._tile_due)))
            self._left_ns -= tokens * self.load_per_token_ps // 1_000
            self._tile_due = False
        if tokens:
            self._loads.append(PromptLoad(member.name, member.computed, tokens))
            member.computed += tokens
        return member.computed == member.cached

    def _tokens(self, member: Member, left: int) -> int:
        """Tokens of the member's next chunk, 0 where nothing of it fits."""
        rest = member.tokens - member.computed
        if self._bound is not None:
            most = min(rest, left)
            within = self._bound.tokens_within(self._left_ns, member.computed, most)
            left = max(within, min(most, self._bound.tile_tokens)) if self._tile_due else within
        if rest <= left:
            return rest
        end = (member.computed + left) // self.grain_tokens * self.grain_tokens
        return max(0, end - member.computed)
