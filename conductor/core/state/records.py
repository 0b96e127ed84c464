"""Records of the state: one for each worker, store agent, frontend, request and order that the core knows.

Plain values, changed in place behind `Core.step` only. Times are ns of the log, sizes are tokens, blocks or bytes as
named. A snapshot holds them field by field, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from halfmoon.conductor.core.state.correction import SeenPrefill, SeenSteps
from halfmoon.conductor.core.state.cost import Fit
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import CacheSplit, LayerStage, Prediction
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.roles import WorkerRole
from halfmoon.schemas.types import INT_MAX, ExactNumerics

#: The halves of a request's work. Every order has both, whatever roles there are.
Half = Literal["prefill", "decode"]


class SlowMark(msgspec.Struct, kw_only=True):
    """A worker waits far too long for another: since when, when that was seen last, and how long in a step."""

    since_ns: int
    seen_ns: int
    waited_ns: int
    expected_ns: int


class Learning(msgspec.Struct, kw_only=True):
    """Where the cost of a worker comes from. The fits are with the duties whose time they are of."""

    #: As joined.
    profile: CostProfile
    #: False for the null engine: its predictions stay those of the profile.
    enabled: bool
    #: Under a policy with `correction_window`: the worker's cost without its correction.
    fitted: CostProfile | None = None
    #: Time of the last measurement of a prefill or a step; 0: none since it joined.
    newest_ns: int = 0


class WorkerReport(msgspec.Struct, kw_only=True):
    """A worker's report of itself, and its disagreements with the state here."""

    # For people: as joined, and from its last heartbeat.
    exact_numerics: ExactNumerics = ""
    queued: int = 0
    running: int = 0
    kv_blocks_used: int = 0
    #: Orders that its last heartbeat did not list though it must know them, and listed though we do not:
    #: since when.
    unlisted_ns: dict[str, int] = {}
    stray_ns: dict[str, int] = {}
    #: Orders whose prefill has ended and whose KV or first token it lacks, by its last heartbeat: since when.
    lacking_ns: dict[str, int] = {}
    #: It was asked to announce itself (for a heartbeat of another incarnation): it drops its orders and joins again.
    asked: bool = False


class RoleChange(msgspec.Struct, kw_only=True):
    """Roles that a worker's process can take on a ChangeRole; and the role that it was ordered to take, "": none."""

    may_become: list[WorkerRole]
    becomes: WorkerRole | Literal[""] = ""


class PromptDuty(msgspec.Struct, kw_only=True):
    """A worker computes prompts, one after the other, or some layers of them."""

    fit: Fit
    #: The longest prompt, where one may be longer than the worker's cache; 0: none may.
    tokens_max: int = 0
    #: Where it listens for workers whose prompts it computes some layers of, and bytes of a token between two.
    stage_addresses: list[str] = []
    activation_bytes: int = 0
    #: It delivers first tokens itself where they are the whole answer.
    answers: bool = False
    #: Orders whose prompt, or some layers of it, it is to compute yet, in the order of their turns, with the time that
    #: each takes.
    orders: dict[str, int] = {}
    # Sums over `orders`: time, blocks to compute, blocks of prompt.
    reserved_ns: int = 0
    pending_blocks: int = 0
    prompt_blocks: int = 0
    #: Since when the first of them is the one that runs.
    head_since_ns: int = 0
    # Under a policy with `correction_window`: ratios of the last prefills by number of busy neighbours, and the
    # corrections by these.
    seen: dict[int, list[SeenPrefill]] = {}
    permille: dict[int, int] = {}
    #: Neighbours that a new prompt is thought to be computed beside, and those beside which the first one is.
    neighbours: int = 0
    head_neighbours: int = 0


class BatchDuty(msgspec.Struct, kw_only=True):
    """A worker decodes sequences, all in one batch."""

    fit: Fit
    #: Tokens of an iteration that computes prompts too; 0: none does. And its time; 0: not bounded.
    token_budget: int = 0
    iteration_ns: int = 0
    #: It keeps no KV: attention workers have it. Its rows take turns in `groups` groups by its option (0: by its
    #: profile), and did in its newest step. Time of such steps, in thousandths of the sum of their parts.
    cache_elsewhere: bool = False
    groups: int = 0
    groups_seen: int = 0
    elsewhere_permille: int = 1_000
    #: Orders that hold a reservation here, oldest first, with their KV blocks.
    orders: dict[str, int] = {}
    #: Sum over `orders`.
    context_tokens: int = 0
    # Under a policy with `correction_window`: the last steps and their correction, and the last answers by their
    # length (in thousandths of their mean).
    steps_seen: list[SeenSteps] = []
    step_permille: int = 1_000
    answers_seen: dict[int, list[int]] = {}


class HoldDuty(msgspec.Struct, kw_only=True):
    """A worker holds parts of others' sequences, and attends to them."""

    #: It takes whole segments of a sequence whose rest is elsewhere.
    segments: bool
    #: The KV heads that its cache has; 0: all.
    first_kv_head: int = 0
    kv_heads: int = 0
    #: Orders of others, with the blocks that it holds of each.
    orders: dict[str, int] = {}
    #: The workers that find it slow.
    slow_by: dict[str, SlowMark] = {}


class WorkerRecord(msgspec.Struct, kw_only=True):
    """A worker that has joined, its duties, and the load that is reserved on it.

    A worker has one duty or several: a mixed one computes prompts and decodes, a decode worker that lends holds parts
    too. A rule asks for the duty rather than for the role's name, so it is right for a role that was added later.
    """

    worker_id: str
    role: WorkerRole
    node_id: str
    incarnation: str
    layout: Layout
    # Of `layout`, computed once.
    block_tokens: int
    block_bytes: int
    kv_blocks: int
    context_tokens_max: int
    batch_max: int
    last_seen_ns: int
    draining: bool = False
    #: As joined, refitted and corrected.
    cost: CostProfile
    learning: Learning
    report: WorkerReport
    change: RoleChange
    #: KV blocks of its cache that are promised: to its own sequences, and to parts of others'.
    reserved_blocks: int = 0
    prompts: PromptDuty | None = None
    batch: BatchDuty | None = None
    holds: HoldDuty | None = None

    @property
    def orders(self) -> dict[str, int]:
        """Orders of which it has a half or a stage, oldest first: KV blocks where it decodes, else ns. To read."""
        if self.batch is not None:
            return self.batch.orders
        return self.prompts.orders if self.prompts is not None else {}

    @property
    def prefills(self) -> dict[str, int]:
        """Orders whose prompt it computes, in the order of their turns, with the time that each takes. To read."""
        return self.prompts.orders if self.prompts is not None else {}

    @property
    def context_tokens(self) -> int:
        """Context of all sequences that it decodes."""
        return self.batch.context_tokens if self.batch is not None else 0

    @property
    def lent(self) -> dict[str, int]:
        """Orders of others, with the blocks that it holds of each. To read."""
        return self.holds.orders if self.holds is not None else {}

    @property
    def lends(self) -> bool:
        """It holds whole segments of others' sequences; a worker that decodes has others hold some of its own too."""
        return self.holds is not None and self.holds.segments

    @property
    def cache_elsewhere(self) -> bool:
        """It decodes and keeps no KV."""
        return self.batch is not None and self.batch.cache_elsewhere

    def give_back(self, order: Order, blocks: int) -> None:
        """The order's sequence here needs so many blocks less than were reserved for it."""
        assert self.batch is not None, (self, order)
        self.batch.orders[order.order_id] -= blocks
        self.reserved_blocks -= blocks
        order.decode.reserved_blocks -= blocks

    @property
    def priced(self) -> bool:
        """Attention elsewhere has a price: it may happen, and the parts of a step were measured."""
        elsewhere = self.lends or self.cache_elsewhere
        return elsewhere and self.cost.channel_trip_ns > 0 and self.cost.attention_token_ps > 0


def part_blocks(layout: Layout, part: KvPart, blocks: int = 0) -> int:
    """Blocks of a part of a request with `blocks` blocks, in the layout of either end."""
    return part.size(blocks, layout.segment_blocks)


class StoreRecord(msgspec.Struct, kw_only=True):
    """A store agent that has joined; its blocks are in the index."""

    node_id: str
    incarnation: str
    host: str
    slots: int
    last_seen_ns: int
    suspected_until_ns: int = 0
    #: Parts of the inventory that were counted.
    parts_seen: dict[int, bool] = {}
    slots_used: int = 0


class FrontendRecord(msgspec.Struct, kw_only=True):
    """A frontend that has joined."""

    frontend_id: str
    incarnation: str
    last_seen_ns: int
    open_requests: int = 0


class Request(msgspec.Struct, kw_only=True):
    """A request that has not ended. It has an order, or it is parked (`order_id` "").

    With `placements` 0 it is parked since it arrived, and not accepted yet.
    """

    event: RequestArrived
    arrived_ns: int
    placements: int = 0
    order_id: str = ""
    #: Workers that failed it: taken again only when there is no other.
    avoid: list[str] = []


class PendingMove(msgspec.Struct, kw_only=True):
    """Segments of an order on their way to a lender, where their room is booked."""

    plan_id: str
    loan: KvPart
    since_ns: int


class PrefillHalf(msgspec.Struct, kw_only=True):
    """The half of an order that computes its prompt."""

    #: When it is to end, and (once it has) when it did.
    end_ns: int
    #: The end from which it would be later than what was accepted.
    until_ns: int = INT_MAX
    # Reserved at the worker: time, blocks to compute, blocks of prompt.
    reserved_ns: int
    pending_blocks: int
    prompt_blocks: int
    #: Where blocks are fetched from ("": nowhere), in company of how many others, and whether from its SSD.
    fetch_node_id: str = ""
    fetch_sharing: int = 1
    fetch_ssd: bool = False
    #: Workers and their layers of the prompt, its own worker's last; and the other workers that still compute.
    stages: list[LayerStage] = []
    staged: list[str] = []
    #: KV of a similar prompt is to stand in for some of its own.
    similar: bool = False
    # Under a policy with `correction_window`: the inputs of its price, and its time beside computing.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    beside_ns: int = 0


class DecodeHalf(msgspec.Struct, kw_only=True):
    """The half of an order that decodes its answer, and the parts of its KV at other workers."""

    #: How long it is to last.
    lasts_ns: int
    # Reserved at the worker.
    reserved_blocks: int
    context_tokens: int
    #: It has joined the batch.
    running: bool = False
    #: Parts with the prompt's first segments; the last `moved_loans` were made by moves.
    loans: list[KvPart] = []
    moved_loans: int = 0
    move: PendingMove | None = None
    #: The attention workers that hold its KV, and the blocks that each has reserved for it (of parts: all together).
    cache: list[KvPart] = []
    cache_blocks: int = 0
    #: The order whose cache it took over; a holder may list the cache under that order's id.
    resumes: str = ""


class Order(msgspec.Struct, kw_only=True):
    """One placement of a request: a prefill half, and a decode half where more than one token is wanted."""

    order_id: str
    request_id: str
    prefill_id: str
    prefill_node_id: str
    #: "": the answer is one token, which the prefill worker delivers.
    decode_id: str
    decode_node_id: str
    #: "prefill" until the prefill worker has answered.
    phase: Half = "prefill"
    placed_ns: int
    #: Sequence of the event that caused it.
    placed_seq: int
    predicted: Prediction
    prefill: PrefillHalf
    decode: DecodeHalf
    weight_version: str = ""

    @property
    def mixed(self) -> bool:
        """One mixed worker has both halves."""
        return self.prefill_id == self.decode_id

    @property
    def answerer_id(self) -> str:
        """The worker that ends the request."""
        return self.decode_id or self.prefill_id


class Counters(msgspec.Struct, kw_only=True):
    """Since the log began."""

    arrived: int = 0
    placed: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: dict[str, int] = {}
    #: Refused by a decode worker after its prefill was done.
    wasted_prefills: int = 0
    prompt_tokens: int = 0
    cached_local_tokens: int = 0
    cached_fetched_tokens: int = 0
    #: Moves of KV between decode workers: done, refused, and their tokens and bytes.
    moves: int = 0
    moves_refused: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    #: Prompts for part of which KV of a similar one stood in, the tokens of those parts, and the tokens that were
    #: computed of these prompts (token-layers over layers).
    similar_requests: int = 0
    similar_tokens: int = 0
    similar_computed_tokens: int = 0


def splits_of(orders: Iterable[Order]) -> dict[CacheSplit, int]:
    """How many orders have their KV at attention workers divided so: at one, by heads, by sequence. No zeros."""
    found: dict[CacheSplit, int] = {}
    for order in orders:
        if order.decode.cache:
            split = _split_of(order.decode.cache)
            found[split] = found.get(split, 0) + 1
    return dict(sorted(found.items()))


def _split_of(cache: Sequence[KvPart]) -> CacheSplit:
    if any(place.segments for place in cache):
        return "sequence"
    return "heads" if len(cache) > 1 else "request"
