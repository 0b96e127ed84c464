"""Times to the first token of a real vLLM: a long prompt from halfmoon's store, and by the engine's own prefill.

By turns in one engine: a prompt that is new, then the one before it, which the engine's host memory (64 rows) has lost
and the store has. HALFMOON_VLLM names vLLM's program and HALFMOON_VLLM_MODEL a model's directory (docs/vllm.md).
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import finish, parsed, parser, spread
from tests.vllm.engines import (
    BLOCK_BYTES,
    HITS,
    MODEL,
    PROGRAM,
    START_S,
    asked,
    counted,
    engine,
    forget,
    store,
    stored,
    told,
)

#: Of a prompt, and of one row.
TOKENS, ROW_TOKENS = 2000, 32
#: Of it the store has whole rows.
KEPT = TOKENS // ROW_TOKENS


def require_vllm() -> None:
    """Ends the program where no vLLM is named."""
    if not PROGRAM or not MODEL:
        sys.exit("HALFMOON_VLLM and HALFMOON_VLLM_MODEL name no vLLM and no model")


def first_token(request: urllib.request.Request) -> tuple[list[int], float]:
    """The streamed answer's tokens, and the seconds to the first of them."""
    tokens: list[int] = []
    began, first_s = time.monotonic(), 0.0
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first_s = first_s or time.monotonic() - began
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
    return tokens, first_s


def in_seconds(kinds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each kind, of its spread."""
    return [f"{kind}: {one['p50']:.2f} ({one['min']:.2f} to {one['max']:.2f})" for kind, one in kinds.items()]


def turns(url: str, count: int) -> Iterator[tuple[float, float]]:
    """Seconds of the engine's own prefill, and of a load from the store, `count` times. Raises RuntimeError where an
    answer differs, or did not come from the store.
    """
    drawn = random.Random(1)
    before: list[int] = []
    said: list[int] = []
    for turn in range(count + 1):
        prompt = [drawn.randrange(100, 40_000) for _ in range(TOKENS)]
        forget(url)
        tokens, own_s = first_token(asked(url, prompt, stream=True))
        stored(url, (turn + 1) * KEPT)
        if before:
            forget(url)
            hits = counted(url, HITS)
            again, store_s = first_token(asked(url, before, stream=True))
            hits = counted(url, HITS) - hits
            if again != said or hits != KEPT * ROW_TOKENS:
                raise RuntimeError(f"{hits} tokens from the store, the same answer: {again == said}")
            yield own_s, store_s
        before, said = prompt, tokens


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--turns", type=int, default=6)
    args = parsed(options, turns=1)
    require_vllm()
    with (
        tempfile.TemporaryDirectory() as name,
        store(Path(name), BLOCK_BYTES, 1200) as (nats, node),
        engine(Path(name), nats, node) as url,
    ):
        told(url, "Hello")
        pairs = list(turns(url, args.turns))
    kinds: dict[str, Any] = {
        "own_prefill_s": spread([own for own, _ in pairs]),
        "from_store_s": spread([loaded for _, loaded in pairs]),
    }
    sizes = {"prompt_tokens": TOKENS, "stored_tokens": KEPT * ROW_TOKENS, "block_bytes": BLOCK_BYTES}
    finish(args, {"turns": args.turns, **sizes, **kinds}, in_seconds(kinds))


if __name__ == "__main__":
    main()
