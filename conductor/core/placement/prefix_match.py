"""The prefix of a prompt that each node holds, and which of its holders are worth a look as sources of a fetch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import Link
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.types import KEY_BYTES

#: Lengths of runs of blocks from the first, longest first, and the nodes whose run has this length.
Runs = list[tuple[int, list[str]]]


class FetchSource(NamedTuple):
    """A node that holds the first blocks of a prompt."""

    node_id: str
    #: In any tier, and in DRAM.
    blocks: int
    dram_blocks: int
    #: Transfers that would leave the node, this one included.
    sharing: int


class PrefixMatch:
    """Blocks of a prompt by node: `held` in any tier, `dram` in DRAM; and `coming` by worker, which computes them for
    prompts that it has accepted. Valid for one step at one time.
    """

    __slots__ = ("_now_ns", "_runs", "_state", "coming", "dram", "dram_runs", "held", "longest")

    def __init__(
        self,
        state: State,
        runs: Runs,
        dram_runs: Runs,
        now_ns: int,
        coming: Mapping[str, int] | None = None,
    ) -> None:
        self.coming = coming or {}
        self.held = _by_node(runs)
        self.dram_runs = dram_runs
        self.dram = self.held if dram_runs is runs else _by_node(dram_runs)
        self.longest = runs[0][0] if runs else 0
        self._state, self._runs, self._now_ns = state, runs, now_ns

    def sources(self, more_than: int = 0) -> Iterator[FetchSource]:
        """Holders of more than `more_than` blocks, longest prefix first, then by id."""
        for blocks, nodes in self._runs:
            if blocks <= more_than:
                return
            for node_id in nodes:
                yield self._source(node_id, blocks)

    def undominated_sources(
        self, measured: Mapping[str, Link] | None, more_than: int
    ) -> Iterator[FetchSource]:
        """As `sources`, without those that cannot be cheaper than an earlier one.

        `measured`: the links to the destination whose bandwidth is known; None: nothing is known of them.
        """
        if measured is None or self.dram is not self.held:
            yield from self.sources(more_than)
            return
        # On an unmeasured link every idle holder costs the same, so only the first needs to be tried. That matters:
        # the first block of a common system prompt may be everywhere.
        idle_seen = False
        for blocks, nodes in self._runs:
            if blocks <= more_than:
                return
            last_id = ""
            for node_id in nodes if not idle_seen else ():
                yield self._source(node_id, blocks)
                last_id = node_id
                idle_seen = node_id not in measured and node_id not in self._state.leaving
                if idle_seen:
                    break
            # A measured link may be faster than expected, so those are tried in any case.
            for node_id in sorted(measured):
                if node_id > last_id and self.held.get(node_id) == blocks:
                    yield self._source(node_id, blocks)

    def _source(self, node_id: str, blocks: int) -> FetchSource:
        sharing = 1 + transfers_leaving(self._state, node_id, self._now_ns)
        return FetchSource(node_id, blocks, self.dram.get(node_id, 0), sharing)


def match_prefix(state: State, request: RequestArrived, now_ns: int) -> PrefixMatch:
    """The longest prefix that each readable node holds; suspected nodes count as holding nothing."""
    blocks_max = len(request.block_keys) // KEY_BYTES
    index = state.index
    runs = readable_runs(state, request.block_keys, now_ns)
    dram_runs = index.runs(request.block_keys, blocks_max, dram_only=True) if index.has_ssd else runs
    coming = state.coming.match(request.block_keys) if state.policy.coming_blocks else None
    return PrefixMatch(state, runs, dram_runs, now_ns, coming)


def readable_runs(state: State, block_keys: bytes, now_ns: int) -> Runs:
    """Runs of blocks from the first, in any tier, at nodes that are not suspected."""
    runs = state.index.runs(block_keys, len(block_keys) // KEY_BYTES)
    if not runs or now_ns >= state.loads.suspected_until_ns:
        return runs
    runs = [
        (blocks, [node for node in nodes if not _suspected(state, node, now_ns)]) for blocks, nodes in runs
    ]
    return [(blocks, nodes) for blocks, nodes in runs if nodes]


def transfers_leaving(state: State, node_id: str, now_ns: int) -> int:
    """Transfers that leave a node at `now_ns`, by their predicted ends."""
    ends = state.leaving.get(node_id)
    return sum(1 for end_ns in ends.values() if end_ns > now_ns) if ends else 0


def _by_node(runs: Runs) -> dict[str, int]:
    held: dict[str, int] = {}
    for blocks, nodes in runs:
        held.update(dict.fromkeys(nodes, blocks))
    return held


def _suspected(state: State, node_id: str, now_ns: int) -> bool:
    store = state.stores.get(node_id)
    return store is not None and store.suspected_until_ns > now_ns
