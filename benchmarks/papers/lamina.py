"""Decode on two pools of devices, or on one: the system `lamina`, with prefill removed.

A request's KV is there when it arrives. It joins the smallest group, between two steps of it, when the KVCache has room
for all that it will grow to; requests are taken in the order that they came. One pool is one group on devices that
hold weights and KVCache, as vLLM's decode is without its prefill: the baseline.

Source: Lamina (arXiv 2405.01814 v2), sections 4.3 and 6.1 for the setting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b

from benchmarks.papers.attention_pipeline import Pipeline, layer_times
from benchmarks.papers.devices import Deployment
from benchmarks.papers.report import DecodeReport, PoolFigures
from benchmarks.papers.saturation import Saturation, figures_of
from halfmoon.conductor.simulation.batch import Steps, tbt_ns
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.report import DeviceTime, Objectives, RunSetting, Traffic, summarise
from halfmoon.conductor.simulation.trace import Arrival, faster
from halfmoon.schemas.cost_profile import CostProfile


class _Group:
    """One batch of sequences that step together."""

    def __init__(self) -> None:
        # The length of each step is told to it, so it needs no costs of its own.
        self.steps = Steps(CostProfile())
        self.joined: dict[str, int] = {}
        self.ready_ns = 0.0


class DecodeRun:
    """One simulation of decode alone; `run` makes it."""

    def __init__(self, deployment: Deployment, arrivals: Sequence[Arrival]) -> None:
        self.deployment, self.arrivals = deployment, arrivals
        self.kv_tokens = deployment.kv_tokens
        self.pipeline = Pipeline(deployment.model.layers, deployment.groups)
        self.groups = [_Group() for _ in range(deployment.groups)]
        self.outcomes: dict[str, Outcome] = {}
        self.waiting: deque[str] = deque()
        self.used_tokens = self.running = self.ended = self.first_fill = self.steps = 0
        self.whole, self.full = Saturation(), Saturation()
        self.digest = blake2b(digest_size=16)
        self.busy_ns = 0.0
        self.moved_bytes = 0

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        told = 0
        while self.waiting or self.running or len(self.outcomes) < len(self.arrivals):
            self._step_all()
            if progress is not None and self.ended - told >= 100:
                told = self.ended
                progress(told)

    def _step_all(self) -> None:
        """One step of every group that has sequences, once those that may join have."""
        if not self.running and not self.waiting:
            idle_until = float(self.arrivals[len(self.outcomes)].at_ns)
            for group in self.groups:
                group.ready_ns = max(group.ready_ns, idle_until)
        self._arrive(max(group.ready_ns for group in self.groups))
        self._join()
        begins = [group.ready_ns for group in self.groups]
        times = [
            layer_times(self.deployment, group.steps.sequences, group.steps.context_tokens)
            for group in self.groups
        ]
        ends = self.pipeline.step(begins, times)
        latest = max((end for end, one in zip(ends, times, strict=True) if one), default=max(begins))
        for group, began, ended, one in zip(self.groups, begins, ends, times, strict=True):
            # A group of nobody looks again when the others have made their step.
            group.ready_ns = ended if one else max(began, latest)
            if one:
                self._stepped(group, began, ended)

    def _stepped(self, group: _Group, began_ns: float, ended_ns: float) -> None:
        sequences = group.steps.sequences
        self.steps += 1
        self.busy_ns += ended_ns - began_ns
        if self.deployment.separate:
            self.moved_bytes += self.deployment.step_bytes(sequences)
        self.whole.step(sequences, began_ns, ended_ns)
        if self.waiting and self.first_fill and self.ended >= self.first_fill:
            self.full.step(sequences, began_ns, ended_ns)
        made = group.steps.made
        over = group.steps.single(ended_ns - began_ns)
        for name, joined in group.joined.items():
            if joined == made:
                self.outcomes[name].first_token_ns = int(ended_ns)
        for name in over:
            outcome = self.outcomes[name]
            outcome.tbt_ns = tbt_ns(group.steps.intervals(group.joined.pop(name)))
            outcome.end, outcome.ended_ns = "finished", int(ended_ns)
            tokens = outcome.prompt_tokens + outcome.output_tokens
            group.steps.leave(name, tokens)
            self.used_tokens -= tokens
            self.running -= 1
            self.ended += 1

    def _arrive(self, now_ns: float) -> None:
        while len(self.outcomes) < len(self.arrivals):
            arrival = self.arrivals[len(self.outcomes)]
            if arrival.at_ns > now_ns:
                return
            name = f"r{len(self.outcomes)}"
            outcome = self.outcomes[name] = Outcome(
                arrived_ns=arrival.at_ns,
                prompt_tokens=arrival.prompt_tokens,
                output_tokens=arrival.output_tokens,
            )
            if arrival.prompt_tokens + arrival.output_tokens > self.kv_tokens:
                outcome.end, outcome.ended_ns = "too_long", int(now_ns)
            else:
                self.waiting.append(name)

    def _join(self) -> None:
        """Whoever has come, in order, to the smallest group, until the KVCache is full."""
        while self.waiting:
            name = self.waiting[0]
            outcome = self.outcomes[name]
            place = min(range(len(self.groups)), key=lambda one: self.groups[one].steps.sequences)
            group = self.groups[place]
            # The group's next step begins before the request comes.
            if outcome.arrived_ns > group.ready_ns:
                return
            tokens = outcome.prompt_tokens + outcome.output_tokens
            if self.used_tokens + tokens > self.kv_tokens:
                self.first_fill = self.first_fill or self.running
                return
            self.waiting.popleft()
            self.used_tokens += tokens
            self.running += 1
            outcome.queue_ns = int(group.ready_ns) - outcome.arrived_ns
            outcome.decode_id = f"group-{place}"
            group.joined[name] = group.steps.made
            group.steps.join(name, outcome.prompt_tokens, outcome.output_tokens)
            self.digest.update(f"{name}:{place}:{int(group.ready_ns)}\n".encode())

    def figures(self) -> PoolFigures:
        return figures_of(self.full, self.whole, self.kv_tokens, self.deployment.dollars_hour)


def simulate_lamina(
    arrivals: Sequence[Arrival],
    deployment: Deployment,
    *,
    slo: Objectives,
    speed: float = 1.0,
    progress: Callable[[int], None] | None = None,
    outcomes: dict[str, Outcome] | None = None,
) -> DecodeReport:
    """As `simulate`, of decode alone: a request's first token is the first of decode. Raises DeploymentImpossible."""
    began = time.perf_counter()
    run = DecodeRun(deployment, faster(arrivals, speed))
    if outcomes is not None:
        run.outcomes = outcomes
    complete = True
    try:
        run.run(progress)
    except KeyboardInterrupt:
        complete = False
    parts = f"{deployment.model_devices} x {deployment.model_device.name}"
    if deployment.separate:
        parts += f" + {deployment.attention_devices} x {deployment.attention_device.name}"
    report = DecodeReport(
        setting=RunSetting(
            system="lamina" if deployment.separate else "homogeneous",
            policy=f"{deployment.groups} group(s) in turn",
            admission="none",
            profile=f"{deployment.model.name} on {parts}",
            prefill=0,
            decode=deployment.replicas,
            speed=speed,
            seed=0,
        ),
        complete=complete,
        slo=slo,
        devices=DeviceTime(decode_gpu_s=round(run.busy_ns / deployment.groups / 1e9, 6)),
        traffic=Traffic(bytes_moved=run.moved_bytes),
        events=run.steps,
        digest=run.digest.hexdigest(),
        pools=run.figures(),
    )
    end_ns = int(max(group.ready_ns for group in run.groups))
    summarise(report, run.outcomes, end_ns)
    report.wall_s = round(time.perf_counter() - began, 3)
    return report
