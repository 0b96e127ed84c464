"""Groups of sequences in turn over the weights' replicas and one attention pool, layer by layer, as discrete events.

A layer of a group is one slice of the model on a replica, then attention on the pool, which serves one group at a time.
Slice k of group j runs on replica (j + k) mod replicas. Devices serve the groups in the order of their turns, so the
time of each event follows from those before it, and no queue of events is needed. What a step leaves of each device
is where the next one begins: a pipeline is never drained between steps.

Source: Lamina (arXiv 2405.01814 v2), section 4.3, rotational staggered pipelining, and 4.2.2, query first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.papers.devices import Deployment

#: Times that differ by less are the same, ns: floats of hours in ns are exact to that.
SAME_NS = 0.01


class LayerTimes(NamedTuple):
    """One layer of one group, ns: its slice, the end of it that makes k and v, attention, and the three messages."""

    slice_ns: float
    key_value_ns: float
    attention_ns: float
    query_sent_ns: float = 0.0
    key_value_sent_ns: float = 0.0
    output_sent_ns: float = 0.0


class Use(NamedTuple):
    """A device's time with one layer of one group. Devices are the replicas from 0 on, then the attention pool."""

    device: int
    group: int
    layer: int
    #: When all that it needs was there, when it began, when it ended.
    ready_ns: float
    began_ns: float
    ended_ns: float


class Pipeline:
    """`step` makes one step of every group. `uses`, where given, is filled with the time of every device."""

    def __init__(self, layers: int, groups: int, *, uses: list[Use] | None = None) -> None:
        self.layers, self.groups = layers, groups
        self._free = [0.0] * max(1, groups - 1)
        self._attention_free = 0.0
        self._uses = uses

    def step(self, begins: Sequence[float], times: Sequence[LayerTimes | None]) -> list[float]:
        """When the step of each group ends, which begins no sooner than `begins`; a group of nobody has no times."""
        ready = list(begins)
        running = [group for group, one in enumerate(times) if one is not None]
        replicas = len(self._free)
        before, grown = self._state(ready, running), 0.0
        layer = 0
        while layer < self.layers:
            self._layer(layer, ready, times)
            layer += 1
            if layer % replicas or self._uses is not None:
                continue
            after = self._state(ready, running)
            growth = after[0] - before[0] if running else 0.0
            # Once all have moved by the same time twice, every further turn of the replicas moves them by it again.
            if abs(growth - grown) < SAME_NS and all(
                abs(new - old - growth) < SAME_NS for new, old in zip(after, before, strict=True)
            ):
                turns = (self.layers - layer) // replicas
                self._shift(ready, running, growth * turns)
                layer += turns * replicas
                after = self._state(ready, running)
            before, grown = after, growth
        return ready

    def _layer(self, layer: int, ready: list[float], times: Sequence[LayerTimes | None]) -> None:
        """One layer of every group; `ready` has when each group's last output was there, and then its next."""
        free, replicas = self._free, len(self._free)
        for group, one in enumerate(times):
            if one is None:
                continue
            replica = (group + layer) % replicas
            began = max(ready[group], free[replica])
            ended = free[replica] = began + one.slice_ns
            query_there = ended - one.key_value_ns + one.query_sent_ns
            attended = max(query_there, self._attention_free)
            done = max(attended + one.attention_ns, ended + one.key_value_sent_ns)
            self._attention_free = done
            if self._uses is not None:
                self._uses.append(Use(replica, group, layer, ready[group], began, ended))
                self._uses.append(Use(replicas, group, layer, query_there, attended, done))
            ready[group] = done + one.output_sent_ns

    def _state(self, ready: list[float], running: list[int]) -> list[float]:
        return [*(ready[group] for group in running), *self._free, self._attention_free]

    def _shift(self, ready: list[float], running: list[int], by_ns: float) -> None:
        for group in running:
            ready[group] += by_ns
        self._free = [at + by_ns for at in self._free]
        self._attention_free += by_ns


def conflicts(uses: Sequence[Use]) -> int:
    """How often a device was busy with one group when another's turn was ready for it."""
    return sum(use.began_ns > use.ready_ns * (1 + 1e-9) for use in uses)


def bubbles_ns(uses: Sequence[Use], since_ns: float, until_ns: float) -> float:
    """Time in which devices did nothing between the two times, all devices together."""
    idle = 0.0
    for device in sorted({use.device for use in uses}):
        spans = sorted((use.began_ns, use.ended_ns) for use in uses if use.device == device)
        busy = sum(max(0.0, min(ended, until_ns) - max(began, since_ns)) for began, ended in spans)
        idle += until_ns - since_ns - busy
    return idle


def layer_times(deployment: Deployment, batch: int, context_tokens: int) -> LayerTimes | None:
    """One layer of a step of `batch` sequences with `context_tokens` together; None for none."""
    if not batch:
        return None
    model = deployment.model
    slice_ns = deployment.model_ns(batch) / model.layers
    attention_ns = deployment.attention_ns(context_tokens) / model.layers
    if not deployment.separate:
        return LayerTimes(slice_ns, 0.0, attention_ns)
    key_value_elements = 2 * model.kv_heads * model.head_dim
    output = deployment.sent_ns(batch, model.width)
    if not deployment.query_first:
        whole = deployment.sent_ns(batch, model.width + key_value_elements)
        return LayerTimes(slice_ns, 0.0, attention_ns, whole, whole, output)
    query = deployment.sent_ns(batch, model.width)
    late_ns = slice_ns * model.key_value_share
    # k and v go behind the query on the same links.
    after_query = max(0.0, query - late_ns - deployment.sent_ns(0, 0))
    key_value = after_query + deployment.sent_ns(batch, key_value_elements)
    return LayerTimes(slice_ns, late_ns, attention_ns, query, key_value, output)
