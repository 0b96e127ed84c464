"""`halfmoon replay --what-if`: the recorded arrivals in a simulated cluster, under the recorded policy and
another one.

The simulated cluster is as the recorded one was: as many workers, their KV, pools and block sizes, and the costs that
the conductor had learned by the end of the log. The recorded policy is simulated too: its difference from the record is
the error of the simulation. Left out are processes that die, and blocks cached before the log begins. A run with
attention workers, or with KV that was lent, is refused. An answer that was not recorded to its end is taken to be as
long as the mean of its class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from halfmoon.conductor.core.corrections import typical_cost
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.cost import answer_class, expected_tokens
from halfmoon.conductor.replay.explain import table
from halfmoon.conductor.replay.histories import PlacementAttempt, RequestHistories, RequestHistory
from halfmoon.conductor.replay.logfile import EventLine
from halfmoon.conductor.replay.verify import Replay
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import (
    DeviceTime,
    Objectives,
    RunSetting,
    SimulationReport,
    summarise,
)
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Decision, MoveKv, StartDecode
from halfmoon.schemas.events import PrefillFinished, StoreJoined, WorkerJoined
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.roles import ROLES, Duty, WorkerRole

#: Bandwidth from the pool into a worker's cache; no event has it, and it is never the bottleneck on a machine with
#: shared memory.
LOAD_BYTES_S = 10_000_000_000
#: Roles of the workers of simulated clusters.
SIMULATED: tuple[WorkerRole, ...] = ("prefill", "decode", "mixed")


#: By which the times of two policies are compared.
Figure = Literal["mean", "p50", "p90", "p99"]


class NothingToSimulate(ValueError):
    """The log holds no request, no worker with a KVCache, or something that is not simulated; the text names it."""


class Recorded(msgspec.Struct, kw_only=True):
    """The input that a log gives to a simulation."""

    policy: Policy
    arrivals: list[Arrival]
    cluster: ClusterShape
    profile: Profile
    outcomes: dict[str, Outcome]
    duration_ns: int
    #: Facts of the record that the simulation cannot repeat, in words.
    caveats: list[str]


class Comparison(msgspec.Struct, kw_only=True):
    """Three columns: as recorded, as simulated under the recorded policy, and under the other policy."""

    recorded: SimulationReport
    simulated: SimulationReport
    what_if: SimulationReport
    profile: Profile
    caveats: list[str]

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "recorded": self.recorded.plain(),
            "simulated": self.simulated.plain(),
            "what_if": self.what_if.plain(),
            "profile": msgspec.to_builtins(self.profile),
            "caveats": self.caveats,
        }


def compare(recorded: Recorded, policy: Policy) -> Comparison:
    """Simulates twice. Raises ConfigurationImpossible."""
    slo = Objectives(ttft_ns=recorded.policy.ttft_slo_ns, tbt_ns=recorded.policy.tbt_slo_ns)
    was, other = (
        simulate(
            recorded.arrivals,
            recorded.cluster,
            wanted,
            recorded.profile,
            RunOptions(seed=wanted.seed, slo=slo),
        )
        for wanted in (recorded.policy, policy)
    )
    return Comparison(
        recorded=_as_it_was(recorded, slo),
        simulated=was,
        what_if=other,
        profile=recorded.profile,
        caveats=recorded.caveats,
    )


def recorded(replay: Replay) -> Recorded:
    """Replays the log for its arrivals, its cluster and its costs. Raises NothingToSimulate."""
    histories = RequestHistories()
    workers: dict[str, WorkerJoined] = {}
    stores: dict[str, StoreJoined] = {}
    costs: dict[str, CostProfile] = {}
    costs_seen: dict[str, CostProfile] = {}
    policy: Policy | None = None
    changed = 0
    lent: set[str] = set()
    for line, decisions in replay:
        histories.see(line, decisions, replay.core)
        lent.update(_borrowers(decisions))
        if isinstance(line, EventLine):
            state = replay.core.state
            if policy is not None and state.policy != policy:
                changed += 1
            policy = state.policy
            if isinstance(line.event, WorkerJoined):
                # A worker that changed its role is simulated from the role that it had first.
                known = workers.get(line.event.worker_id)
                role = known.role if known is not None else line.event.role
                workers[line.event.worker_id] = msgspec.structs.replace(line.event, role=role)
            elif isinstance(line.event, StoreJoined):
                stores[line.event.node_id] = line.event
            for worker in state.workers.values():
                if costs_seen.get(worker.worker_id) is not worker.cost:
                    costs_seen[worker.worker_id] = worker.cost
                    costs[worker.worker_id] = typical_cost(worker)
    found = [history for history in histories.of.values() if history.seq]
    if not found or policy is None:
        raise NothingToSimulate("the log holds no request")
    layouts = [worker.layout for worker in workers.values()]
    if not layouts or not layouts[0].block_bytes:
        raise NothingToSimulate("the workers of this log have no KVCache (null engine, or none joined)")
    _check_simulated(list(workers.values()), len(lent))
    caveats = []
    if again := sum(len(history.attempts) - 1 for history in found if history.attempts):
        caveats.append(f"{again} placements were lost and made again; simulated processes never die")
    if changed:
        caveats.append(f"changes of policy ({changed}): the last one is simulated throughout")
    return Recorded(
        policy=policy,
        arrivals=_arrivals(found, replay.core),
        cluster=_cluster(list(workers.values()), stores),
        profile=_profile(list(workers.values()), stores, costs, replay.core, policy),
        outcomes={history.arrived.request_id: _outcome(history) for history in found},
        duration_ns=max([history.end_ns for history in found]) - found[0].arrived_ns,
        caveats=caveats,
    )


def _borrowers(decisions: Iterable[Decision]) -> Iterator[str]:
    """Requests of which another decode worker is to hold a part."""
    for decision in decisions:
        if isinstance(decision, MoveKv) or (isinstance(decision, StartDecode) and decision.loans):
            yield decision.request_id


def _check_simulated(workers: Sequence[WorkerJoined], lent: int) -> None:
    """Raises NothingToSimulate where a kind of worker, or lending of KV, had a part in the run."""
    roles = Counter(worker.role for worker in workers)
    for role, count in roles.items():
        if role not in SIMULATED:
            which = f"{role} worker, which is" if count == 1 else f"{role} workers, which are"
            raise NothingToSimulate(f"the run has {count} {which} not simulated here")
    if not _with_duty(workers, "prompts") or not _with_duty(workers, "batch"):
        raise NothingToSimulate("the run had no worker that prefills, or none that decodes")
    if lent:
        whose = "1 request" if lent == 1 else f"{lent} requests"
        raise NothingToSimulate(
            f"decode workers lent KV of {whose} to each other, which is not simulated here"
        )


def _arrivals(histories: Sequence[RequestHistory], core: Core) -> list[Arrival]:
    start_ns, arrivals = histories[0].arrived_ns, []
    for history in histories:
        event = history.arrived
        known = core.state.answers.get(answer_class(event.max_tokens))
        tokens = (
            history.finished.completion_tokens
            if history.finished
            else expected_tokens(known, event.max_tokens)
        )
        arrivals.append(
            Arrival(
                at_ns=history.arrived_ns - start_ns,
                prompt_tokens=event.prompt_tokens,
                output_tokens=max(1, tokens),
                max_tokens=event.max_tokens,
                block_keys=event.block_keys,
                priority=event.priority,
                tenant=event.tenant,
                sketch=event.sketch,
                documents=event.documents,
                ttft_slo_ns=event.ttft_slo_ns,
                tbt_slo_ns=event.tbt_slo_ns,
            )
        )
    return arrivals


def _cluster(workers: Sequence[WorkerJoined], stores: dict[str, StoreJoined]) -> ClusterShape:
    def slots(pool: Sequence[WorkerJoined]) -> int:
        return max((stores[one.node_id].slots for one in pool if one.node_id in stores), default=0)

    prefills, decodes = _with_duty(workers, "prompts"), _with_duty(workers, "batch")
    mixed = [worker for worker in prefills if worker in decodes]
    return ClusterShape(
        prefill=len(prefills) - len(mixed),
        decode=len(decodes) - len(mixed),
        mixed=len(mixed),
        block_tokens=workers[0].layout.block_tokens,
        pool_blocks=slots(prefills),
        decode_pool_blocks=slots([worker for worker in decodes if worker not in mixed] or prefills),
        kv_blocks=min(worker.kv_blocks for worker in decodes),
        token_budget=min((worker.token_budget for worker in mixed), default=0),
        iteration_ns=min((worker.iteration_ns for worker in mixed), default=0),
    )


def _with_duty(workers: Sequence[WorkerJoined], duty: Duty) -> list[WorkerJoined]:
    return [worker for worker in workers if duty in ROLES[worker.role].duties]


def _profile(
    workers: Sequence[WorkerJoined],
    stores: dict[str, StoreJoined],
    costs: dict[str, CostProfile],
    core: Core,
    policy: Policy,
) -> Profile:
    """The mean of the learned costs of each role's workers; links as the median of those measured."""
    layout = workers[0].layout
    prefills = [costs[worker.worker_id] for worker in _with_duty(workers, "prompts")]
    decodes = [costs[worker.worker_id] for worker in _with_duty(workers, "batch")]
    mean = {
        field: sum(getattr(cost, field) for cost in of) // len(of)
        for of, part in ((prefills, "prefill"), (decodes, "decode"))
        for field in CostProfile.__struct_fields__
        if field.startswith(part)
    }
    links = sorted(link.bytes_s for sources in core.state.links.values() for link in sources.values())
    return Profile(
        name=f"{layout.model}, as recorded",
        cost=CostProfile(**mean),
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        numerics=layout.numerics,
        activation_bytes=max(worker.activation_bytes for worker in workers),
        kv_bytes=min(worker.kv_blocks for worker in workers) * layout.block_bytes,
        pool_bytes=max((store.slots for store in stores.values()), default=0) * layout.block_bytes,
        context_tokens_max=min(worker.context_tokens_max for worker in workers),
        batch_max=min(worker.batch_max for worker in workers),
        link_bytes_s=links[len(links) // 2] if links else policy.link_bytes_s,
        link_latency_ns=policy.link_latency_ns,
        load_bytes_s=LOAD_BYTES_S,
    )


def _outcome(history: RequestHistory) -> Outcome:
    """The history of a request in the form of a simulation's outcome."""
    outcome = Outcome(
        arrived_ns=history.arrived_ns,
        prompt_tokens=history.arrived.prompt_tokens,
        output_tokens=history.finished.completion_tokens if history.finished else 0,
        end={"open": "", "rejected": history.rejected.reason if history.rejected else ""}.get(
            history.ending, history.ending
        ),
        ended_ns=history.end_ns or -1,
        tbt_ns=history.finished.tbt_ns if history.finished else -1,
        wasted=history.rejected is not None and history.rejected.reason == "decode_refused",
    )
    for attempt in history.attempts:
        then = attempt.prefilled
        if then is not None:
            outcome.compute_ns += then.compute_ns
            outcome.local_tokens, outcome.fetched_tokens = (
                then.cached_local_tokens,
                then.cached_fetched_tokens,
            )
            if outcome.first_token_ns < 0:
                outcome.first_token_ns = _first_token_ns(attempt, then)
    if history.attempts:
        predicted = history.attempts[0].order.predicted
        outcome.predicted_ttft_ns, outcome.predicted_tbt_ns = predicted.ttft_ns, predicted.tbt_ns
    return outcome


def _first_token_ns(attempt: PlacementAttempt, then: PrefillFinished) -> int:
    """A prefill worker reports after its last push, a mixed one as soon as it has drawn the token, which decodes that
    share its iterations hold up.
    """
    if attempt.order.decode_worker_id == attempt.order.worker_id:
        return attempt.prefill_end_ns
    return attempt.at_ns + then.queue_ns + then.compute_ns


def _as_it_was(recorded: Recorded, slo: Objectives) -> SimulationReport:
    report = SimulationReport(
        setting=RunSetting(
            system="recorded",
            policy=recorded.policy.name,
            admission=recorded.policy.admission,
            profile=recorded.profile.name,
            prefill=recorded.cluster.prefill,
            decode=recorded.cluster.decode,
            mixed=recorded.cluster.mixed,
            speed=1.0,
            seed=recorded.policy.seed,
        ),
        slo=slo,
        devices=DeviceTime(
            prefill_gpu_s=round(sum(outcome.compute_ns for outcome in recorded.outcomes.values()) / 1e9, 6)
        ),
    )
    first_ns = next(iter(recorded.outcomes.values())).arrived_ns
    return summarise(report, recorded.outcomes, first_ns + recorded.duration_ns)


def losses(found: Comparison, percent: float, at: Figure) -> list[str]:
    """Where the other policy loses more than `percent` to the recorded one, both as simulated, in words.

    Times are compared at one figure. The share of requests that held both objectives counts too: a policy that refuses
    long requests has the best times.
    """
    was, other, told = found.simulated, found.what_if, []
    for name, of in (("first token", "ttft_ms"), ("between tokens", "tbt_ms")):
        before, after = (float(getattr(getattr(each.service, of), at)) for each in (was, other))
        if after > before * (1 + percent / 100):
            more = f", {(after / before - 1):.1%} more" if before else ""
            told.append(
                f"{name}, {at}: {after:,.1f} ms under {other.setting.policy}, {before:,.1f} ms before{more}"
            )
    if other.service.effective_capacity < was.service.effective_capacity * (1 - percent / 100):
        told.append(
            f"both objectives held: {other.service.effective_capacity:.1%} under {other.setting.policy}, "
            f"{was.service.effective_capacity:.1%} before"
        )
    return told


def described(found: Comparison, source: str) -> str:
    """Side by side, for people."""
    columns = [found.recorded, found.simulated, found.what_if]
    cost, profile = found.profile.cost, found.profile
    lines = [
        f"{found.recorded.setting.workers}; SLO: first token "
        f"{found.recorded.slo.ttft_ns / 1e9:g} s, between tokens {found.recorded.slo.tbt_ns / 1e6:g} ms",
        f"fitted: prefill {cost.prefill_base_ns / 1e6:.1f} ms + {cost.prefill_per_token_ps / 1e9:.4f} ms·(n-p) + "
        f"{cost.prefill_per_token2_fs / 1e12:.3e} ms·(n²-p²); step {cost.decode_base_ns / 1e6:.1f} ms + "
        f"{cost.decode_per_sequence_ns / 1e6:.2f} ms·batch + {cost.decode_per_context_token_ps / 1e9:.2e} ms·context; "
        f"links {profile.link_bytes_s / 1e6:,.0f} MB/s",
        "",
    ]
    rows: list[tuple[str, ...]] = [("", "", "recorded", "simulated", f"what if: {source}", "")]
    named = (f"{each.setting.policy}, {each.setting.admission}" for each in columns)
    endings = [each.endings for each in columns]
    rows.append(("", "policy, admission", *named, ""))
    rows.append(("", "requests", *(str(each.requests) for each in endings), ""))
    rows.append(("", "finished", *(str(each.completed) for each in endings), ""))
    for reason in sorted({reason for each in endings for reason in each.rejected}):
        rows.append(("", reason, *(str(each.rejected.get(reason, 0)) for each in endings), ""))
    rows.append(("", "failed", *(str(each.failed) for each in endings), ""))
    rows.append(("", "wasted prefills", *(str(each.wasted_prefills) for each in endings), ""))
    for name, of in (("first token", "ttft_ms"), ("between tokens", "tbt_ms")):
        for part in ("mean", "p50", "p90", "p99"):
            rows.append(
                (
                    "",
                    f"{name}, {part}",
                    *(f"{getattr(getattr(each.service, of), part):,.1f} ms" for each in columns),
                    "",
                )
            )
    rows.append(
        ("", "both objectives held", *(f"{each.service.effective_capacity:.1%}" for each in columns), "")
    )
    rows.append(("", "tokens found in KVCache", *(f"{each.service.token_reuse:.1%}" for each in columns), ""))
    rows.append(("", "prefill computed", *(f"{each.devices.prefill_gpu_s:.2f} s" for each in columns), ""))
    lines += [line[2:] for line in table(rows)]
    lines += ["", *(f"not repeated: {caveat}" for caveat in found.caveats)] if found.caveats else []
    return "\n".join(lines)
