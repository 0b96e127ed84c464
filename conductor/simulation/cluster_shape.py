"""The shape of a simulated cluster: how many workers of each role, and the sizes of their parts."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class ConfigurationImpossible(ValueError):
    """A cluster that cannot be; the text says why."""


class Workers(NamedTuple):
    """How many have each role."""

    prefill: int
    decode: int
    mixed: int = 0

    def __str__(self) -> str:
        return " + ".join(f"{count} {role}" for role, count in self._asdict().items() if count)


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers and sizes of a cluster's parts. Sizes of -1 are the profile's."""

    #: Workers of each role: some of both, or with mixed ones none of either.
    prefill: int
    decode: int
    mixed: int = 0
    block_tokens: int = 512
    #: Blocks of a prefill or mixed node's pool, of a decode node's pool (0: it keeps nothing), of a worker's own
    #: cache.
    pool_blocks: int = -1
    decode_pool_blocks: int = -1
    kv_blocks: int = -1
    #: Of each node's network; 0: the profile's.
    link_bytes_s: int = 0
    #: Tokens of one iteration of a colocated worker with chunked prefill.
    chunk_tokens: int = 512
    #: Decode workers lend room and attention to each other.
    lend: bool = False
    #: Of a mixed worker's iteration; 0: the most that holds the policy's TBT objective by the profile.
    token_budget: int = 0

    def check(self) -> None:
        """Raises ConfigurationImpossible."""
        for name in ("prefill", "decode"):
            none = self.mixed > 0 and not self.prefill and not self.decode
            if getattr(self, name) < 1 and not none:
                raise ConfigurationImpossible(f"{name}: at least one worker is needed")

    @property
    def workers(self) -> Workers:
        return Workers(self.prefill, self.decode, self.mixed)
