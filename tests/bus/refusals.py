"""A plain connection with one process's credentials, that tries many subjects and notes which the server refuses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

import nats

from halfmoon.bus.config import BusConfig
from halfmoon.workers.frontend.edges.nats_service import settled

_REFUSAL = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)
#: Refusals are told one by one, and the library keeps so many commands only.
BATCH = 200


class Attacker:
    """Made by `Attacker.connect`; `close` it."""

    def __init__(self) -> None:
        self.nc: nats.NATS = nats.NATS()
        self._refused: set[tuple[str, str]] = set()

    @classmethod
    async def connect(cls, config: BusConfig) -> Attacker:
        attacker = cls()
        options = config.options() | {"error_cb": attacker._note, "allow_reconnect": False}
        await attacker.nc.connect(**options)
        return attacker

    async def close(self) -> None:
        await self.nc.close()

    async def _note(self, problem: Exception) -> None:
        if found := _REFUSAL.search(str(problem)):
            self._refused.add((found[1].lower(), found[2].lower()))

    async def may_publish(self, subjects: Iterable[str], payload: bytes = b"{}") -> set[str]:
        """Those of `subjects` that the server takes a message on: a refusal comes before the answer to a ping."""
        wanted = list(subjects)
        for at in range(0, len(wanted), BATCH):
            for subject in wanted[at : at + BATCH]:
                await self.nc.publish(subject, payload)
            await settled(self.nc)
        await asyncio.sleep(0)
        return {each for each in wanted if ("publish", each.lower()) not in self._refused}

    async def may_hear(self, subjects: Iterable[str]) -> set[str]:
        """Those of `subjects` that the server takes a subscription to."""
        wanted = list(subjects)
        for at in range(0, len(wanted), BATCH):
            made = [await self.nc.subscribe(subject) for subject in wanted[at : at + BATCH]]
            await settled(self.nc)
            for subscription in made:
                await subscription.unsubscribe()
            await settled(self.nc)
        return {each for each in wanted if ("subscription", each.lower()) not in self._refused}
