"""Clusters of colocated workers, the papers' baselines, under routers of their own: the core has no such role.

- `vllm`, `vllm-chunked`: the worker with the least prefill work in hand, then the fewest requests.
- `vllm-prefix`: the earliest first token, its own cache counted (the papers' local cache-aware).
- `dynamo`: the published cost of NVIDIA Dynamo's KV router: prefill blocks that are not cached, plus active blocks;
  workers with chunked prefill and prefix caching.
- `sarathi`: stall-free batching; the fewest prompt tokens to compute, then the fewest requests. Its token budget is
  the largest that holds the TBT objective by the profile. `chunks-alone` and `hybrid` have one of its two parts each:
  chunks of the same budget but decodes in iterations of their own, and whole prompts beside decodes.

Only requests that no worker could ever hold are refused. A worker's prefix cache is its own device memory.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

from benchmarks.papers.batching.iteration_times import ProfileTimes, budget_for
from benchmarks.papers.batching.ways import Batching, ComparedFormer
from benchmarks.papers.batching.worker import IterationWorker
from benchmarks.papers.mixed import SimulatedMixed, SimulatedMixedRequest
from halfmoon.conductor.simulation.clock import Clock
from halfmoon.conductor.simulation.options import ClusterShape, ConfigurationImpossible
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import (
    LoadSample,
    Objectives,
    RunSetting,
    SimulationReport,
    device_time,
    summarise,
)
from halfmoon.conductor.simulation.simulate import SAMPLE_NS_MIN, SAMPLES
from halfmoon.conductor.simulation.trace import Arrival, faster
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.batch_former import BlockRoom

#: Systems whose workers go iteration by iteration.
ITERATING = {
    "sarathi": Batching.STALL_FREE,
    "chunks-alone": Batching.CHUNKED,
    "hybrid": Batching.HYBRID,
}
COLOCATED = ("vllm", "vllm-prefix", "vllm-chunked", "dynamo", *ITERATING)
#: Share of a cache that stays free when a request enters, so that those who run can grow. Source: vLLM's watermark.
SPARE_SHARE = 0.01


class _Worker(Protocol):
    """A colocated worker, as the run looks at it."""

    worker_id: str
    prefill_ns: int
    decode_ns: int

    @property
    def queue_ns(self) -> int:
        """Predicted prefill time of all that wait or are prefilled."""

    @property
    def queued(self) -> int: ...

    @property
    def running(self) -> int: ...

    def step_ns(self) -> float:
        """A step of those who run now."""


W = TypeVar("W", bound=_Worker)


class _ColocatedRun(ABC, Generic[W]):
    """One simulation of colocated workers."""

    def __init__(
        self,
        system: str,
        cluster: ClusterShape,
        profile: Profile,
        slo: Objectives,
        *,
        seed: int,
        noise_percent: int,
    ) -> None:
        count = cluster.prefill + cluster.decode
        if count < 1:
            raise ConfigurationImpossible(f"{system}: at least one worker is needed")
        self.names = [f"worker-{place:0{len(str(count - 1))}}" for place in range(count)]
        self.system, self.slo = system, slo
        self.block_tokens = cluster.block_tokens
        block_bytes = profile.layout(cluster.block_tokens).block_bytes
        self.kv_blocks = cluster.kv_blocks if cluster.kv_blocks >= 0 else profile.kv_bytes // block_bytes
        if self.kv_blocks < 1:
            raise ConfigurationImpossible(
                f"a worker's own cache holds no block of {self.block_tokens} tokens"
            )
        self.clock = Clock(seed, noise_percent)
        self.outcomes: dict[str, Outcome] = {}
        self.samples: list[LoadSample] = []
        self.open = self.routed = 0
        self.digest = blake2b(digest_size=16)
        self.workers = self.make_workers(cluster, profile)

    @abstractmethod
    def make_workers(self, cluster: ClusterShape, profile: Profile) -> list[W]:
        """One for each of `names`; each calls `_ended` with what has ended."""

    def _ended(self, _: object) -> None:
        self.open -= 1

    @abstractmethod
    def start(self, name: str, arrival: Arrival, outcome: Outcome, blocks: int) -> str:
        """Gives a request of so many blocks to a worker: its name."""

    def arrive(self, arrivals: Sequence[Arrival], place: int) -> None:
        arrival, name = arrivals[place], f"r{place}"
        outcome = self.outcomes[name] = Outcome(
            arrived_ns=self.clock.now_ns,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
        )
        if place + 1 < len(arrivals):
            self.clock.at(arrivals[place + 1].at_ns, self.arrive, arrivals, place + 1)
        blocks = -(-(arrival.prompt_tokens + arrival.output_tokens) // self.block_tokens)
        if blocks > self.kv_blocks:
            outcome.end, outcome.ended_ns = "too_long", self.clock.now_ns
            return
        self.open += 1
        worker_id = self.start(name, arrival, outcome, blocks)
        outcome.prefill_id = outcome.decode_id = worker_id
        self.digest.update(f"{name}:{worker_id}\n".encode())

    def sample(self, sample_ns: int) -> None:
        count = len(self.workers)
        steps = sum(w.step_ns() for w in self.workers if w.running)
        self.samples.append(
            LoadSample(
                at_ns=self.clock.now_ns,
                prefill_load=sum(w.queue_ns for w in self.workers) / count / self.slo.ttft_ns,
                decode_load=steps / count / self.slo.tbt_ns,
                queued=sum(w.queued for w in self.workers),
                running=sum(w.running for w in self.workers),
            )
        )
        self.clock.after(sample_ns, self.sample, sample_ns)


class _ReservingRun(_ColocatedRun[SimulatedMixed]):
    """Workers whose requests hold from the start what they will grow to."""

    def make_workers(self, cluster: ClusterShape, profile: Profile) -> list[SimulatedMixed]:
        return [
            SimulatedMixed(
                name,
                self.clock,
                profile,
                block_tokens=self.block_tokens,
                kv_blocks=self.kv_blocks,
                chunk_tokens=cluster.chunk_tokens if self.system in ("vllm-chunked", "dynamo") else 0,
                prefix_caching=self.system in ("vllm-prefix", "dynamo"),
                ended=self._ended,
            )
            for name in self.names
        ]

    def start(self, name: str, arrival: Arrival, outcome: Outcome, blocks: int) -> str:
        keys = arrival.block_keys
        named = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        request = SimulatedMixedRequest(name, outcome, named, blocks)
        worker = self._choose(request)
        worker.start(request)
        return worker.worker_id

    def _choose(self, request: SimulatedMixedRequest) -> SimulatedMixed:
        if self.system == "vllm-prefix":
            return min(
                self.workers, key=lambda w: (w.queue_ns + w.predicted_ns(request), len(w.batch), w.worker_id)
            )
        if self.system == "dynamo":
            return min(
                self.workers,
                key=lambda w: (w.prompt_blocks + w.active_blocks - w.cached_blocks(request), w.worker_id),
            )
        return min(self.workers, key=lambda w: (w.queue_ns, len(w.batch), w.worker_id))


class _IteratingRun(_ColocatedRun[IterationWorker]):
    """Workers that form each iteration anew, and whose requests take room as they grow."""

    def make_workers(self, cluster: ClusterShape, profile: Profile) -> list[IterationWorker]:
        times = ProfileTimes(profile.cost)
        spare = int(SPARE_SHARE * self.kv_blocks)
        return [
            IterationWorker(
                name,
                self.clock,
                times,
                ComparedFormer(
                    BlockRoom(self.kv_blocks, self.block_tokens, spare_blocks=spare),
                    budget_tokens=budget_for(times, self.slo.tbt_ns),
                    sequences_max=profile.batch_max,
                    batching=ITERATING[self.system],
                ),
                self._ended,
            )
            for name in self.names
        ]

    def start(self, name: str, arrival: Arrival, outcome: Outcome, blocks: int) -> str:
        worker = min(self.workers, key=lambda w: (w.prompt_tokens, w.running + w.queued, w.worker_id))
        worker.start(name, outcome)
        return worker.worker_id


def simulate_colocated(
    system: str,
    arrivals: Sequence[Arrival],
    cluster: ClusterShape,
    profile: Profile,
    *,
    slo: Objectives,
    seed: int = 0,
    speed: float = 1.0,
    noise_percent: int = 0,
    progress: Callable[[int], None] | None = None,
    outcomes: dict[str, Outcome] | None = None,
) -> SimulationReport:
    """As `simulate`, with `cluster.prefill + cluster.decode` workers of `system`. Raises ConfigurationImpossible."""
    began = time.perf_counter()
    made = _IteratingRun if system in ITERATING else _ReservingRun
    run = made(system, cluster, profile, slo, seed=seed, noise_percent=noise_percent)
    if outcomes is not None:
        run.outcomes = outcomes
    paced = faster(arrivals, speed)
    complete, told = True, 0
    if paced:
        run.clock.at(paced[0].at_ns, run.arrive, paced, 0)
        run.clock.at(
            paced[0].at_ns, run.sample, max((paced[-1].at_ns - paced[0].at_ns) // SAMPLES, SAMPLE_NS_MIN)
        )
    try:
        while run.open or len(run.outcomes) < len(paced):
            run.clock.step()
            if progress is not None and len(run.outcomes) - told >= 100:
                told = len(run.outcomes)
                progress(told)
    except KeyboardInterrupt:
        complete = False
    report = SimulationReport(
        setting=RunSetting(
            system=system,
            policy={"vllm-prefix": "local_cache_aware", "dynamo": "dynamo"}.get(system, "least_loaded"),
            admission="none",
            profile=profile.name,
            prefill=cluster.prefill,
            decode=cluster.decode,
            speed=speed,
            seed=seed,
        ),
        complete=complete,
        slo=slo,
        events=run.clock.calls,
        digest=run.digest.hexdigest(),
        load=run.samples,
    )
    summarise(report, run.outcomes, run.clock.now_ns)
    prefill_ns, decode_ns = (sum(w.prefill_ns for w in run.workers), sum(w.decode_ns for w in run.workers))
    report.devices = device_time(prefill_ns, decode_ns, report.service.duration_s, len(run.workers))
    report.wall_s = round(time.perf_counter() - began, 3)
    return report
