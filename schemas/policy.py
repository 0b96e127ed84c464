"""The conductor's configuration: the policy, its limits and its clocks. It travels in the log, as its first event.

A change at run time is an event too (`PolicyChanged`), so that replay sees it at the right place.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.types import Blocks, Ns, Part

PolicyName = Literal[
    "halfmoon",
    "mooncake",
    "local_cache_aware",
    "least_loaded",
    "round_robin",
    "random",
    "dynamo",
    "lmetric",
    "sticky",
]
#: A version of a policy that another package brings (entry points `halfmoon.policies`): NAME@VERSION.
PLUGIN_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}@[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}"
PolicyTitle = Annotated[str, Meta(pattern=rf"^({'|'.join(get_args(PolicyName))}|{PLUGIN_PATTERN})$(?!\n)")]
#: Where there are mixed workers and pairs of others: whichever is predicted to be better, mixed workers while they take
#: it, or never a mixed one.
MixedChoice = Literal["predicted", "preferred", "never"]
AdmissionName = Literal["predicted", "early", "late", "none"]
#: Price of a copy of blocks: the average saving by a block, or the measured saving by the displaced ones.
CopiesPrice = Literal["reuse", "displaced"]
#: Workers that may join a group: every idle prefill worker, or idle ones beyond the number busy on average.
GroupFrom = Literal["idle", "spare"]
#: Whether the conductor changes roles of workers by load: never, it only advises, or it does.
ElasticMode = Literal["off", "advise", "on"]


class PlacementRules(Part, frozen=True):
    """The choice of workers for a request."""

    name: PolicyTitle = "halfmoon"
    #: Of the `random` policy.
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    #: How a mixed worker is chosen over a prefill and a decode worker; older logs have no mixed workers.
    mixed_choice: MixedChoice = "predicted"
    #: Number of a worker's last prefills and answers whose measured times correct its predictions; 0, as in older logs:
    #: they are not corrected.
    correction_window: Annotated[int, Meta(ge=0, le=1_000)] = 0
    #: A mixed worker is chosen by the policy of that name; False, as in older logs: by the first token, whatever it is.
    mixed_by_policy: bool = False
    #: A request of one token is answered by its prefill worker, where all can; False, as in older logs: by a decode
    #: worker, which gets its KV.
    one_token_prefills: bool = False


class AdmissionRules(PlacementRules, frozen=True):
    """Acceptance of requests, and the wait for a place."""

    admission: AdmissionName = "predicted"
    #: SLO of a request that names none.
    ttft_slo_ns: Ns = 30 * SECOND_NS
    tbt_slo_ns: Ns = 1 * SECOND_NS
    #: Reject when one pool's queue is this deep, whatever is predicted (bounded queues).
    queued_max_per_worker: Annotated[int, Meta(ge=1, le=1_000_000)] = 512
    #: How often one request may be placed before it fails.
    placements_max: Annotated[int, Meta(ge=1, le=100)] = 5
    #: How long an accepted request waits for a worker when a pool is empty.
    unplaced_ns_max: Ns = 30 * SECOND_NS
    #: How long a new request waits for one, never longer than its TTFT objective; 0: it is refused at once.
    arrival_wait_ns_max: Ns = 0
    #: Refuse prompts that no node's pool could hold, were it empty.
    pools_bound: bool = False
    #: The policy's objectives are never below twice a request's time alone, and at an idle worker a prediction that
    #: nothing recent supports refuses nothing. False, as in older logs: every prediction above the objective refuses.
    idle_served: bool = False
    #: Under overload, when larger prompts are refused first, a text counts as its share for each request of a burst
    #: that is about it; False, as in older logs: as the whole.
    overload_shared: bool = False


class TransferRules(AdmissionRules, frozen=True):
    """Transfers of blocks between nodes, and places that hold KV for others."""

    #: Fetch when best_prefix > local_prefix * threshold (in percent; 100 = fetch whenever it is cheaper).
    fetch_threshold_percent: Annotated[int, Meta(ge=100, le=100_000)] = 100
    #: Price of a copy of blocks that another node has; in older logs: by reuse.
    copies_price: CopiesPrice = "reuse"
    #: Expected of a transfer between two nodes until one was measured: bandwidth of a link, of an SSD, and latency.
    link_bytes_s: Annotated[int, Meta(ge=1, le=2**50)] = 2_000_000_000
    ssd_bytes_s: Annotated[int, Meta(ge=1, le=2**50)] = 500_000_000
    link_latency_ns: Ns = 500_000
    #: A push of less than a block takes as long as its messages, and teaches nothing of a link's bandwidth; False, as
    #: in older logs, whose pushes were of whole blocks: it teaches.
    links_by_blocks: bool = False
    #: Blocks of a prompt that a prefill worker has accepted before count as held there; False, as in older logs, whose
    #: workers did not wait for them: only blocks that are readable count.
    coming_blocks: bool = False
    #: So do those that a mixed worker has accepted; False, as in older logs, whose mixed workers did not wait for them.
    coming_at_mixed: bool = False
    #: A prompt is computed before waiting ones that take longer, but no prompt waits for those that come later than so
    #: many times its own duration behind it; 0, as in older logs: each worker computes its prompts as they come.
    passing_durations: Annotated[int, Meta(ge=0, le=1_000)] = 0
    #: Number of other holders that are named with a fetch, to turn to when its source fails.
    fetch_replicas: Annotated[int, Meta(ge=0, le=16)] = 0
    #: A prefix gets one more holder when this many transfers leave its holder at once (0: never).
    hot_transfers: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    #: StartDecode names the node that KV comes from, so that the worker believes no other; False, as in older logs: no.
    sources_named: bool = False
    #: A holder slower than this percentage of its measured attention time gets no new KV while another has room; 0, as
    #: in older logs: it does. And for how long after it was last seen to be slow.
    slow_place_percent: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    slow_place_ns: Ns = 30 * SECOND_NS


class GroupRules(TransferRules, frozen=True):
    """Groups of prefill workers that compute one prompt."""

    #: Most prefill workers that compute one prompt together, each some layers; 1, as in older logs: each computes its
    #: own alone. And the percentage that each further one must take off the prompt's time.
    prefill_group: Annotated[int, Meta(ge=1, le=64)] = 1
    group_gain_percent: Annotated[int, Meta(ge=1, le=99)] = 10
    #: Which idle ones; in older logs: all.
    group_from: GroupFrom = "idle"


class SimilarRules(GroupRules, frozen=True):
    """Prompts that are alike, for requests that let KV of one stand in for another's."""

    #: It does where so many tokens would be computed otherwise (0: never) and so many percent of the runs of tokens are
    #: the same. By figures of SmolLM2-135M on a CPU.
    similar_tokens_min: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 700
    similar_percent_min: Annotated[int, Meta(ge=1, le=100)] = 40


class MoveRules(SimilarRules, frozen=True):
    """Moves of running requests' KV between decode workers."""

    #: How often KV of running requests may move from decode workers without room to those with it, where decode workers
    #: lend; 0, as in older logs: never.
    move_period_ns: Ns = 0
    #: A decode worker gives KV away from this percentage of reserved cache on, and takes some below the second one.
    move_from_percent: Annotated[int, Meta(ge=1, le=1_000)] = 90
    move_to_percent: Annotated[int, Meta(ge=1, le=100)] = 70
    #: Percentage of a lender's cache that a move leaves free.
    move_reserve_percent: Annotated[int, Meta(ge=0, le=100)] = 10
    #: Tokens that a worker sends during one decode step at most.
    move_step_tokens: Annotated[int, Meta(ge=1, le=65536)] = 32
    #: A move that its decode worker has not answered within this time is over; 0, as in older logs: it stays booked
    #: until its order ends.
    move_answer_ns: Ns = 0


class ElasticRules(MoveRules, frozen=True):
    """Changes of workers' roles by load."""

    #: Prefill and decode workers that may change roles do so by load; "off", as in older logs: only by RoleWanted.
    elastic: ElasticMode = "off"
    #: Period of the planner, and the time whose arrivals count as load.
    elastic_period_ns: Ns = 1 * SECOND_NS
    elastic_window_ns: Ns = 15 * SECOND_NS
    #: A pool gives a worker if afterwards it is this percentage emptier than the other one was, for `elastic_hold_ns`.
    elastic_gain_percent: Annotated[int, Meta(ge=1, le=100)] = 10
    elastic_hold_ns: Ns = 2 * SECOND_NS
    #: And where the pool that gets it is at least this full, in percent.
    elastic_from_percent: Annotated[int, Meta(ge=0, le=1_000)] = 60
    #: And where the pool that gives it is afterwards at most this full, in percent; 0, as in older logs: however full.
    elastic_giver_percent_max: Annotated[int, Meta(ge=0, le=1_000)] = 0
    #: Least time from one change to the next; and most changes at once.
    elastic_pause_ns: Ns = 1 * SECOND_NS
    elastic_changes_max: Annotated[int, Meta(ge=1, le=1_000)] = 1


class LivenessRules(ElasticRules, frozen=True):
    """Signs of life, and the time that counts."""

    #: Period of heartbeats, and the silence after which a process is lost.
    heartbeat_ns: Ns = 1 * SECOND_NS
    lost_after_ns: Ns = 4 * SECOND_NS
    #: A suspected store is not read from for this long.
    suspected_ns: Ns = 5 * SECOND_NS
    #: The log's time is its server's clock, which may be set. A step back by more than a heartbeat, or forward by more
    #: than this, is not time that passed. 0, as in older logs: it is, and after a step back time stands still.
    clock_step_ns_max: Ns = 0
    #: Number of events after which conductors compare their states.
    digest_events: Annotated[int, Meta(ge=100, le=1_000_000)] = 10_000


class Policy(LivenessRules, frozen=True):
    """How requests are placed and refused. Where a rule has changed, its default is the old one: older logs do not name
    it. `present` has those of today.

    The groups are a chain, since a struct has one base; in a message all fields stand side by side.
    """

    def present(self) -> Policy:
        """With the rules of placement that a new cluster, the simulator and the comparisons of policies have."""
        return msgspec.structs.replace(
            self,
            copies_price="displaced",
            group_from="spare",
            links_by_blocks=True,
            coming_blocks=True,
            coming_at_mixed=True,
            passing_durations=8,
            mixed_by_policy=True,
            one_token_prefills=True,
            elastic_giver_percent_max=85,
            overload_shared=True,
        )


#: Bytes of a page, and most pages of a block of `Layout.opaque`: 4 KiB to 390 MiB.
OPAQUE_PAGE_BYTES, OPAQUE_PAGES_MAX = 4096, 100_000


class Layout(Part, frozen=True):
    """The shape of KV blocks, equal in all processes: `[layers, 2, block_tokens, kv_heads, head_dim]` of dtype."""

    model: str
    model_fingerprint: str
    layers: Annotated[int, Meta(ge=0, le=10_000)]
    kv_heads: Annotated[int, Meta(ge=0, le=100_000)]
    head_dim: Annotated[int, Meta(ge=0, le=100_000)]
    block_tokens: Annotated[int, Meta(ge=1, le=65536)]
    dtype: Literal["float32", "bfloat16", "float16", "none"]
    numerics: Literal["exact", "fast"] = "exact"
    #: Exact attention is the merge of states over segments of this many tokens (0, as in older logs: over one segment).
    segment_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0

    @classmethod
    def opaque(cls, block_bytes: int, layers: int = 1) -> Layout:
        """A store's blocks of another engine: bytes of which only the length is known, whole pages of 4 KiB a layer.

        Equal sizes are equal layouts, whatever engine's they are: keys tell engines apart. The shape is nominal,
        `[layers, 2, 1, pages, 1024]` of two bytes each. Raises ValueError.
        """
        pages, rest = divmod(block_bytes, OPAQUE_PAGE_BYTES * layers)
        if rest or not 1 <= pages * layers <= OPAQUE_PAGES_MAX:
            least, most = OPAQUE_PAGE_BYTES * layers, OPAQUE_PAGES_MAX * OPAQUE_PAGE_BYTES
            raise ValueError(f"{block_bytes} is no multiple of {least} from {least} to {most}")
        return cls(
            model="opaque",
            model_fingerprint="opaque",
            layers=layers,
            kv_heads=pages,
            head_dim=OPAQUE_PAGE_BYTES // 4,
            block_tokens=1,
            dtype="float16",
            numerics="fast",
        )

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return (
            2
            * self.kv_heads
            * self.head_dim
            * {"float32": 4, "bfloat16": 2, "float16": 2, "none": 0}[self.dtype]
        )

    @property
    def segment_blocks(self) -> int:
        return self.segment_tokens // self.block_tokens

    @property
    def layer_block_bytes(self) -> int:
        return self.token_layer_bytes * self.block_tokens

    @property
    def block_bytes(self) -> int:
        return self.layer_block_bytes * self.layers

    def blocks(self, tokens: int) -> Blocks:
        """Blocks that hold `tokens`, the last one perhaps in part."""
        return -(-tokens // self.block_tokens)

    def name(self) -> str:
        """The layout part of a root key."""
        segments = f"-{self.segment_tokens}" if self.segment_tokens else ""
        return (
            f"{self.layers}x2x{self.block_tokens}x{self.kv_heads}x{self.head_dim}-{self.numerics}{segments}"
        )
