"""Times to the first token of a real vLLM whose prompts' KV comes from another one, against one vLLM that does both.

By turns, each with a new prompt: one engine computes and answers (`alone`); the other engine answers, asked when the
first one has computed (`after`), or at the same moment (`at_once`), so that layers arrive while the next ones are
computed. The KV goes by halfmoon's store agents over TCP. HALFMOON_VLLM names vLLM's program and HALFMOON_VLLM_MODEL a
model's directory (docs/vllm.md).
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import finish, parsed, parser, spread
from benchmarks.vllm_tier import TOKENS, first_token, in_seconds, require_vllm
from tests.vllm.engines import HITS, asked, counted, told
from tests.vllm.pair import Pair, answer, running_pair, with_params

KINDS = ("alone", "after", "at_once")


def timed(pair: Pair, kind: str, prompt: list[int]) -> float:
    """Seconds from the request to its first token."""
    prefill, decode = pair.prefill.url, pair.decode.url
    if kind == "alone":
        return first_token(asked(prefill, prompt, stream=True))[1]
    began = time.monotonic()
    if kind == "after":
        params = answer(prefill, prompt, {"do_remote_decode": True}, 1)["kv_transfer_params"]
        waited_s = time.monotonic() - began
        return waited_s + first_token(with_params(decode, prompt, params, stream=True))[1]
    order = uuid.uuid4().hex
    computes = {"do_remote_decode": True, "halfmoon_order": order}
    computing = threading.Thread(target=answer, args=(prefill, prompt, computes, 1))
    computing.start()
    answers = {"do_remote_prefill": True, "halfmoon_order": order, "halfmoon_worker": "prefill"}
    _, found = first_token(with_params(decode, prompt, answers, stream=True))
    computing.join()
    return found


def measured(pair: Pair, turns: int) -> list[dict[str, float]]:
    """Seconds by kind, of each turn. Raises RuntimeError where the KV did not come."""
    drawn, found = random.Random(1), []
    for turn in range(turns):
        row: dict[str, float] = {}
        for kind in KINDS if turn % 2 == 0 else KINDS[::-1]:
            came = counted(pair.decode.url, HITS)
            row[kind] = timed(pair, kind, [drawn.randrange(100, 40_000) for _ in range(TOKENS)])
            came = counted(pair.decode.url, HITS) - came
            if came != (0 if kind == "alone" else TOKENS):
                raise RuntimeError(f"{kind}: {came:.0f} tokens came")
        found.append(row)
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--turns", type=int, default=6)
    args = parsed(options, turns=1)
    require_vllm()
    with tempfile.TemporaryDirectory() as name, running_pair(Path(name)) as pair:
        for engine in (pair.prefill, pair.decode):
            told(engine.url, "Hello")
        rows = measured(pair, args.turns)
    kinds: dict[str, Any] = {f"{kind}_s": spread([row[kind] for row in rows]) for kind in KINDS}
    more: dict[str, Any] = {
        f"{kind}_more_s": spread([row[kind] - row["alone"] for row in rows]) for kind in KINDS[1:]
    }
    finish(args, {"turns": args.turns, "prompt_tokens": TOKENS, **kinds, **more}, in_seconds(kinds | more))


if __name__ == "__main__":
    main()
