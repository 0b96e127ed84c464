"""A stream loses its head, as by age or size; asking for it is denied."""

from __future__ import annotations

from halfmoon.bus.connection import Bus


async def expire(bus: Bus, stream: str, *, before: int) -> None:
    """All messages of a smaller sequence than `before` are gone; one at least stays."""
    config = (await bus.jetstream.ask(f"STREAM.INFO.{stream}"))["config"]
    kept = await bus.last_seq(stream) - before + 1
    assert kept > 0
    for most in (kept, -1):
        await bus.jetstream.ask(f"STREAM.UPDATE.{stream}", {**config, "max_msgs": most})
    assert await bus.held(stream) == (before, before + kept - 1)
