"""Prompts that wait for blocks of prompts before them at their worker. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from halfmoon.workers.prefill.actions import Actions
from halfmoon.workers.prefill.job import Job
from halfmoon.workers.prefill.stages import PrefillStage


def reserve_in_turn(begun: Iterable[Job], waiting: Iterable[Job], at_ns: int, out: Actions) -> None:
    """Slots for those of `waiting`, in their order, that none before them brings blocks for; `begun` are before all.

    Which blocks a prompt finds is seen when its slots are reserved, and not again. So it asks for them once those that
    are fetched or computed before it are there.
    """
    before = [*begun]
    for job in waiting:
        if job.stage in (PrefillStage.QUEUED, PrefillStage.TAKING):
            break  # what it brings is not known yet
        if job.stage is PrefillStage.AWAITING_PREFIX and not any(one.brings_for(job) for one in before):
            job.reserve(at_ns, out)
        before.append(job)
