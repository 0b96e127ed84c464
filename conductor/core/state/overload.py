"""Overload: which requests are refused first when more work is offered than the prefill pool can do.

Refusing every request that finds the queue at the limit keeps every queue at the limit: all requests wait nearly as
long as the SLO, and large prompts push out many small ones. So, under overload, a prompt is refused the sooner the
larger it is: one of the mean size when half of the TTFT SLO is queued before it, one twice as large at a quarter.
Cached tokens do not count: times to compute are compared.

A text that many ask for at once and no node has is large for each of them as long as all are refused, and small for all
once one was placed. So what is compared is a request's share: the text's time divided by the requests of a burst that
have asked for it (`overload_shared`). A burst goes on while the next request comes within half the time of a mean
prompt. With no such bound the turns of one session are a burst too, and workers compute prompts of sessions that had
lost their KV: on drawn agents' sessions that cost 12 % of capacity, the bound 2 to 5 %, and bursts gained as much.

Ours (policy `halfmoon` under admission `predicted`); the papers' rule has no such order.
"""

from __future__ import annotations

import msgspec

#: Arrivals that count in the running means.
OFFERED_WINDOW = 256
#: With fewer arrivals a burst looks like overload.
OFFERED_MIN = 64
#: Texts whose refused requests are counted.
REFUSED_MAX = 2_048


class RefusedText(msgspec.Struct):
    """Requests of a burst about one text, all of them refused."""

    count: int
    last_ns: int


class Offered(msgspec.Struct, kw_only=True):
    """Running means over the last arrivals, refused ones included."""

    count: int = 0
    last_ns: int = 0
    #: Time from one to the next, and to compute one, where it was or would have been placed.
    gap_ns: int = 0
    prefill_ns: int = 0
    #: Prefill workers that an arrival found busy, times a thousand; and how many arrivals looked.
    busy_permille: int = 0
    looks: int = 0
    #: By the first block that no node has; the newest last.
    refused: dict[bytes, RefusedText] = {}


def learn_busy(offered: Offered, busy: int) -> None:
    """An arrival finds `busy` prefill workers busy."""
    offered.looks += 1
    offered.busy_permille += (1_000 * busy - offered.busy_permille) // min(offered.looks, OFFERED_WINDOW)


def learn_offered(offered: Offered, prefill_ns: int, now_ns: int) -> None:
    # A plain mean of the first arrivals, a running one from then on: else the first one would weigh for long.
    if offered.count:
        offered.gap_ns += (now_ns - offered.last_ns - offered.gap_ns) // min(offered.count, OFFERED_WINDOW)
    offered.count += 1
    offered.last_ns = now_ns
    offered.prefill_ns += (prefill_ns - offered.prefill_ns) // min(offered.count, OFFERED_WINDOW)


def asked_for(offered: Offered, missing_key: bytes, now_ns: int) -> int:
    """Requests of a burst about the text whose first block that no node has is `missing_key`, one that comes now
    included.
    """
    text = offered.refused.get(missing_key)
    return 1 if text is None or now_ns - text.last_ns > offered.prefill_ns // 2 else text.count + 1


def learn_refused(offered: Offered, missing_key: bytes, now_ns: int, *, refused: bool) -> None:
    """A request about the text is refused or placed; b"": it has no such block, and teaches nothing."""
    asked = asked_for(offered, missing_key, now_ns)
    offered.refused.pop(missing_key, None)
    if not refused or not missing_key:
        return
    offered.refused[missing_key] = RefusedText(asked, now_ns)
    if len(offered.refused) > REFUSED_MAX:
        del offered.refused[next(iter(offered.refused))]


def queue_allowed_ns(offered: Offered, workers: int, prefill_ns: int, ttft_limit_ns: int) -> int:
    """The longest queue that a prompt of `prefill_ns` may find; without overload, the TTFT limit itself."""
    if offered.count < OFFERED_MIN or offered.prefill_ns <= workers * offered.gap_ns:
        return ttft_limit_ns
    # Half of the limit for the mean prompt, and in proportion: see the module.
    return ttft_limit_ns * offered.prefill_ns // (2 * max(1, prefill_ns))
