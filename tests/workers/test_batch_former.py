"""The batch former: what an iteration holds, whatever comes when, and however little room there is."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.batching.iteration_times import token_budget
from benchmarks.papers.batching.ways import Batching, ComparedFormer
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.workers.batch_former import BatchFormer, BlockRoom, Iteration, PromptChunk
from halfmoon.workers.token_budget import TILE_ROWS

BLOCK_TOKENS = 4
ITERATIONS_MAX = 3_000
#: 20 ns an iteration, 3 ns a token of a prompt and much more later in it, 2 ns a sequence and a half for each token.
COST = CostProfile(
    prefill_base_ns=20,
    prefill_per_token_ps=3_000,
    prefill_per_token2_fs=1_000_000,
    decode_base_ns=20,
    decode_per_sequence_ns=2,
    decode_per_context_token_ps=500,
)


class PrefixRoom(BlockRoom):
    """Some requests find a whole block of theirs cached."""

    def enter(self, name: str, tokens: int) -> int | None:
        entered = super().enter(name, tokens)
        return None if entered is None else self.prefix(name, tokens)

    def prefix(self, name: str, tokens: int) -> int:
        return (tokens - 1) // 8 * BLOCK_TOKENS if int(name) % 3 else 0


@dataclass
class World:
    """Requests by number: (iteration in which it comes, prompt, answer). Runs them, and checks every iteration."""

    former: BatchFormer
    room: BlockRoom
    requests: list[tuple[int, int, int]]
    drawn: dict[str, int] = field(default_factory=dict)
    #: Tokens that are in the cache, by who runs.
    cached: dict[str, int] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)
    first_token: list[str] = field(default_factory=list)
    batches: list[Iteration] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    #: The budget of each iteration, over and over.
    budgets: list[int] = field(default_factory=list)
    batching: Batching = Batching.STALL_FREE
    #: Of each iteration; 0: whatever it takes.
    iteration_ns: int = 0

    def run(self) -> None:
        # What comes in one iteration comes in the order of the numbers.
        coming = sorted((at, number) for number, (at, _, _) in enumerate(self.requests))
        open_ = len(self.requests)
        for iteration in range(ITERATIONS_MAX):
            while coming and coming[0][0] <= iteration:
                number = coming.pop(0)[1]
                self.former.add(str(number), self.requests[number][1])
                self.due[str(number)] = self.requests[number][1]
            if self.budgets:
                self.former.budget_tokens = self.budgets[iteration % len(self.budgets)]
            open_ -= self._iteration()
            if not open_:
                return
        raise AssertionError(f"somebody starves: {self.former.waiting}, {self.former.running}")

    def _iteration(self) -> int:
        """How many ended."""
        waited, ran = self.former.waiting, self.former.running
        batch = self.former.form()
        self.batches.append(batch)
        if batch.idle:
            assert not waited, f"nothing is computed, and {waited} wait"
        self._check_who(batch, waited, ran)
        if self.iteration_ns:
            self._check_time(batch)
        for name in batch.preempted:
            self.preempted.add(name)
            self.due[name] += 0 if self.former.replays else self.drawn_since(name)
            del self.cached[name]
        for name in batch.decodes:
            self.cached[name] += 1
        for name in batch.admitted:
            self.cached[name] = 0
        for load in batch.loads:
            assert (load.start, load.tokens > 0) == (self.cached[load.name], True)
            self.cached[load.name] += load.tokens
        for chunk in batch.chunks:
            assert chunk.tokens > 0
            assert self.cached[chunk.name] >= self.prefix(chunk.name), "not all of it is loaded"
            assert chunk.start == self.cached[chunk.name], (chunk, self.cached)
            self.cached[chunk.name] += chunk.tokens
            assert chunk.last == (self.cached[chunk.name] == self.due[chunk.name]), (chunk, self.due)
            assert chunk.last or (chunk.start + chunk.tokens) % self.former.grain_tokens == 0
        self._check_room()
        self.former.made()
        return self._draw(batch)

    def drawn_since(self, name: str) -> int:
        """Tokens drawn since it was admitted last: what its cache holds beyond its prompt, and the newest."""
        return max(0, self.cached[name] - self.due[name] + (self.cached[name] >= self.due[name]))

    def _draw(self, batch: Iteration) -> int:
        ended = 0
        for name in (*batch.decodes, *(chunk.name for chunk in batch.chunks if chunk.last)):
            prompt, answer = self.requests[int(name)][1:]
            # The answer is whole whatever was computed twice: what is drawn now comes after all that the cache holds.
            self.drawn[name] = self.cached[name] - prompt + 1
            if self.drawn[name] == 1:
                self.first_token.append(name)
            if self.drawn[name] == answer:
                self.former.remove(name)
                del self.cached[name]
                ended += 1
        return ended

    def _check_who(self, batch: Iteration, waited: tuple[str, ...], ran: tuple[str, ...]) -> None:
        former = self.former
        decoding = [name for name in ran if self.cached[name] >= self.due[name]]
        names = [*batch.decodes, *(chunk.name for chunk in batch.chunks)]
        assert len(names) == len(set(names)), "one request twice"
        assert list(batch.admitted) == list(waited[: len(batch.admitted)]), "not in the order of arrival"
        # Who was preempted was admitted last, and waits before all others.
        staying = [name for name in ran if name not in batch.preempted]
        assert staying == list(ran[: len(staying)])
        assert former.waiting == (*ran[len(staying) :], *waited)[len(batch.admitted) :]
        assert not (batch.preempted and batch.admitted)
        assert len(former.running) <= former.sequences_max
        partial = [name for name in staying if name not in decoding]
        chunked = [chunk.name for chunk in batch.chunks]
        loading = [load.name for load in batch.loads]
        assert [name for name in (*partial, *batch.admitted) if name in chunked] == chunked
        if self.batching is Batching.STALL_FREE:
            assert batch.tokens <= max(former.budget_tokens, len(batch.decodes))
            assert set(batch.admitted) <= {*chunked, *loading}, "room is taken, and nothing computed"
            assert list(batch.decodes) == [name for name in decoding if name in staying], "somebody stalls"
            unfinished = [chunk for chunk in batch.chunks if not chunk.last]
            assert len(unfinished) <= 1
            assert not unfinished or unfinished[0] == batch.chunks[-1] or former.grain_tokens > 1
        if self.batching in (Batching.CHUNKED, Batching.PREFILL_FIRST):
            assert not (batch.decodes and batch.chunks)
        if self.batching in (Batching.HYBRID, Batching.PREFILL_FIRST):
            assert all(chunk.last for chunk in batch.chunks), "a prompt was cut"
            assert len(batch.chunks) <= 1 or batch.tokens - len(batch.decodes) <= former.budget_tokens

    def _check_time(self, batch: Iteration) -> None:
        """Nothing but what comes first, and what is behind something cached, makes it longer than it may be."""
        context = sum(self.cached[name] + 1 for name in batch.decodes)
        took_ns = COST.iteration_ns([(0, 0)], len(batch.decodes), context)
        tile = self.former.grain_tokens if self.former.grain_tokens > 1 else TILE_ROWS
        loads = {load.name: load for load in batch.loads}
        chunks = {chunk.name: chunk for chunk in batch.chunks}
        # One that is loaded in part is the last one, and has no chunk.
        names = list(dict.fromkeys([*chunks, *loads]))
        for place, name in enumerate(names):
            due = place == 0 or name in loads or name in batch.admitted
            if (load := loads.get(name)) is not None:
                load_ns = load.tokens * self.former.load_per_token_ps // 1_000
                took_ns += load_ns
                small = load_ns <= COST.chunk_ns(self.prefix(name), tile) or load.tokens == 1
                assert took_ns <= self.iteration_ns or (due and small), (batch, took_ns)
                due = due and not self.former.load_per_token_ps
            if (chunk := chunks.get(name)) is not None:
                took_ns += COST.chunk_ns(chunk.start, chunk.tokens)
                due = due and (place == 0 or chunk.start > 0)
                assert took_ns <= self.iteration_ns or (due and chunk.tokens <= tile), (batch, took_ns)

    def prefix(self, name: str) -> int:
        """Tokens of it that were cached when it was admitted."""
        return self.room.prefix(name, self.due[name]) if isinstance(self.room, PrefixRoom) else 0

    def _check_room(self) -> None:
        assert self.room.free >= 0
        assert set(self.cached) == set(self.former.running)
        for name, tokens in self.cached.items():
            computed, due = self.former.progress(name)
            assert computed <= due == self.due[name]
            assert tokens <= self.room._tokens[name]
        held = sum(-(-self.room._tokens[name] // BLOCK_TOKENS) for name in self.former.running)
        assert self.room.free == self.room.blocks - held, "room is lost"


REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12
)
BUDGETS = st.lists(st.integers(1, 24), min_size=1, max_size=3)


def world(
    requests: list[tuple[int, int, int]],
    *,
    budgets: list[int],
    blocks: int = 15,
    sequences: int = 8,
    grain: int = 1,
    batching: Batching = Batching.STALL_FREE,
    replays: bool = False,
    spare: int = 0,
    room: type[BlockRoom] = BlockRoom,
    iteration_ns: int = 0,
    load_per_token_ps: int = 0,
) -> World:
    space = room(blocks, BLOCK_TOKENS, spare_blocks=spare)
    budget = max(budgets[0], grain)
    if batching is Batching.STALL_FREE:
        former = BatchFormer(
            space,
            budget_tokens=budget,
            sequences_max=sequences,
            grain_tokens=grain,
            replays=replays,
            cost=COST,
            iteration_ns=iteration_ns,
        )
        former.load_per_token_ps = load_per_token_ps
    else:
        former = ComparedFormer(
            space,
            budget_tokens=budget,
            sequences_max=sequences,
            grain_tokens=grain,
            batching=batching,
            replays=replays,
        )
    return World(
        former,
        space,
        requests,
        budgets=[max(one, grain) for one in budgets],
        batching=batching,
        iteration_ns=iteration_ns,
    )


# 15 blocks of 4 tokens hold any one request of these, and not three.
@settings(max_examples=100, deadline=None)
@given(
    REQUESTS,
    BUDGETS,
    st.integers(15, 60),
    st.integers(1, 12),
    st.sampled_from([1, 1, BLOCK_TOKENS]),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([BlockRoom, PrefixRoom]),
    st.sampled_from([0, 0, 1, 60, 200, 400]),
    st.sampled_from([0, 1_000, 20_000]),
)
def test_stall_free_batches_keep_their_invariants_and_every_request_ends(
    requests: list[tuple[int, int, int]],
    budgets: list[int],
    blocks: int,
    sequences: int,
    grain: int,
    replays: bool,
    spare: int,
    room: type[BlockRoom],
    iteration_ns: int,
    load_per_token_ps: int,
) -> None:
    played = world(
        requests,
        budgets=budgets,
        blocks=blocks,
        sequences=sequences,
        grain=grain,
        replays=replays,
        spare=spare,
        room=room,
        iteration_ns=iteration_ns,
        load_per_token_ps=load_per_token_ps,
    )
    played.run()
    assert played.drawn == {str(number): answer for number, (_, _, answer) in enumerate(requests)}
    assert played.room.free == blocks
    # First come, first served, but for those whose room was taken away.
    order = sorted(range(len(requests)), key=lambda number: (requests[number][0], number))
    undisturbed = [str(number) for number in order if str(number) not in played.preempted]
    seen = list(dict.fromkeys(played.first_token))
    assert [name for name in seen if name not in played.preempted] == undisturbed


@pytest.mark.parametrize("batching", [one for one in Batching if one is not Batching.STALL_FREE])
@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, budgets=BUDGETS, blocks=st.integers(15, 60), replays=st.booleans())
def test_what_it_is_compared_with_keeps_its_own_rules(
    batching: Batching, requests: list[tuple[int, int, int]], budgets: list[int], blocks: int, replays: bool
) -> None:
    played = world(requests, budgets=budgets, blocks=blocks, batching=batching, replays=replays)
    played.run()
    assert played.drawn == {str(number): answer for number, (_, _, answer) in enumerate(requests)}


def test_decodes_beyond_a_budget_that_became_smaller_all_run_and_prompts_wait_for_them() -> None:
    former = BatchFormer(BlockRoom(100, BLOCK_TOKENS), budget_tokens=8, sequences_max=10)
    for name in "abcdef":
        former.add(name, 1)
    former.form()
    former.made()
    former.budget_tokens = 4
    former.add("long", 20)
    assert former.form() == Iteration(decodes=tuple("abcdef"))
    former.made()
    for name in "abc":
        former.remove(name)
    assert former.form() == Iteration(("d", "e", "f"), (PromptChunk("long", 0, 1, last=False),), ("long",))


def test_chunks_become_smaller_as_their_prompt_goes_on_and_more_sequences_decode() -> None:
    former = BatchFormer(
        BlockRoom(1_000, BLOCK_TOKENS),
        budget_tokens=1_000,
        sequences_max=100,
        grain_tokens=4,
        cost=COST,
        iteration_ns=1_000,
    )
    former.add("long", 400)
    sizes = []
    for iteration in range(40):
        (chunk,) = former.form().chunks
        sizes.append(chunk.tokens)
        former.made()
        assert COST.chunk_ns(chunk.start, chunk.tokens + 4) > 980 or chunk.last, iteration
        if chunk.last:
            break
    assert sizes[0] == 28
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sizes[-2] < sizes[0] // 3
    former.remove("long")
    context = 0
    for number in range(30):
        former.add(str(number), 10)
    while former.waiting or former.prefilling:
        batch = former.form()
        context += len(batch.decodes) + sum(11 for chunk in batch.chunks if chunk.last)
        former.made()
    former.add("next", 400)
    batch = former.form()
    assert len(batch.decodes) == 30
    ((_, _, tokens, _),) = map(astuple, batch.chunks)
    assert (
        COST.iteration_ns([(0, tokens)], 30, context)
        <= 1_000
        < COST.iteration_ns([(0, tokens + 4)], 30, context)
    )


def test_who_gets_room_computes_a_tile_though_it_is_slower_behind_what_was_cached() -> None:
    room = PrefixRoom(1_000, BLOCK_TOKENS)
    former = BatchFormer(
        room, budget_tokens=100, sequences_max=9, grain_tokens=4, cost=COST, iteration_ns=100
    )
    former.add("3", 4)
    former.add("1", 40)
    # The first one leaves 52 ns. Four tokens take 28 at the start of a prompt, and 156 behind 16 of them.
    assert [astuple(chunk)[:3] for chunk in former.form().chunks] == [("3", 0, 4), ("1", 16, 4)]


@pytest.mark.parametrize(
    ("iteration_ns", "token_ns", "seen"),
    [
        # 280 ns are 7 tokens. The last two leave 200, and a tile behind them takes 156.
        (300, 40, [([7], []), ([7], []), ([2], [16])]),
        # The last four leave 40.
        (300, 60, [*[([4], [])] * 4, ([], [16])]),
        # 80 ns are 2 tokens, but as much is loaded as a tile would take, and something in any case.
        (100, 40, [*[([3], [])] * 5, ([1], []), ([], [16])]),
        (100, 400, [*[([1], [])] * 16, ([], [16])]),
    ],
)
def test_a_prefix_is_loaded_within_the_time_of_iterations_and_nobody_passes_it(
    iteration_ns: int, token_ns: int, seen: list[tuple[list[int], list[int]]]
) -> None:
    room = PrefixRoom(1_000, BLOCK_TOKENS)
    former = BatchFormer(
        room, budget_tokens=100, sequences_max=9, grain_tokens=4, cost=COST, iteration_ns=iteration_ns
    )
    former.load_per_token_ps = token_ns * 1_000
    former.add("1", 40)
    former.add("3", 4)
    for loaded, starts in seen:
        batch = former.form()
        assert ([load.tokens for load in batch.loads], [chunk.start for chunk in batch.chunks]) == (
            loaded,
            starts,
        )
        assert former.waiting == ("3",)
        former.made()


def test_decodes_come_first_then_the_prompt_that_is_begun_then_new_ones() -> None:
    former = BatchFormer(BlockRoom(100, BLOCK_TOKENS), budget_tokens=8, sequences_max=10)
    former.add("a", 3)
    former.add("b", 12)
    former.add("c", 2)
    shown = []
    for _ in range(3):
        shown.append(former.form())
        former.made()
    assert shown == [
        Iteration((), (PromptChunk("a", 0, 3, last=True), PromptChunk("b", 0, 5, last=False)), ("a", "b")),
        Iteration(("a",), (PromptChunk("b", 5, 7, last=True),)),
        Iteration(("a", "b"), (PromptChunk("c", 0, 2, last=True),), ("c",)),
    ]


def test_the_last_to_come_gives_its_room_up_and_computes_its_answer_as_a_prompt() -> None:
    former = BatchFormer(BlockRoom(3, BLOCK_TOKENS), budget_tokens=16, sequences_max=4)
    former.add("a", 7)
    former.add("b", 4)
    former.form()
    former.made()  # a: 7 tokens in 2 blocks; b: 4 in 1; each has drawn one.
    batch = former.form()
    assert (batch.decodes, batch.preempted, former.waiting) == (("a",), ("b",), ("b",))
    former.made()
    former.form()
    former.made()
    former.remove("a")
    assert former.form().chunks == (PromptChunk("b", 0, 5, last=True),)


def test_who_is_removed_while_an_iteration_runs_is_passed_over_when_it_is_made() -> None:
    room = BlockRoom(10, BLOCK_TOKENS)
    former = BatchFormer(room, budget_tokens=16, sequences_max=4)
    former.add("a", 5)
    former.add("b", 5)
    former.form()
    former.remove("a")
    former.remove("nobody")
    former.made()
    assert former.running == ("b",)
    assert room.free == 8


def test_a_request_that_fits_not_even_alone_is_a_fault_of_ours() -> None:
    former = BatchFormer(BlockRoom(1, BLOCK_TOKENS), budget_tokens=16, sequences_max=4)
    former.add("a", 4)
    former.form()
    former.made()
    with pytest.raises(AssertionError, match="not even alone"):
        former.form()


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 5), st.integers(0, 50))
def test_the_budget_is_the_most_tiles_that_hold_the_objective_and_grows_with_it(
    slo: int, more: int, per_token: int, base: int
) -> None:
    def iteration_ns(tokens: int) -> int:
        return base + per_token * tokens

    def budget(objective: int) -> int:
        return token_budget(iteration_ns, objective, tile=16, tokens_max=200)

    chosen = budget(slo)
    assert chosen % 16 == 0
    assert 16 <= chosen <= 200
    assert chosen == 16 or iteration_ns(chosen) <= slo
    assert chosen + 16 > 200 or iteration_ns(chosen + 16) > slo
    assert budget(slo + more) >= chosen
