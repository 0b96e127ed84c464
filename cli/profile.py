"""`halfmoon profile`: what prefill and decode cost on this machine, as the conductor's cost model sees it."""

from __future__ import annotations

import argparse
import os

import msgspec
import orjson

from halfmoon.cli import model as models
from halfmoon.cli.options import add_config, add_model


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_config(parser)
    parser.add_argument("--attention", choices=("auto", "sdpa", "flash"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--budget-s", type=float, default=30.0, help="how long to measure")
    parser.add_argument("--json", action="store_true")


async def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    from halfmoon.workers.profiler import measure

    layout = models.layout_of(args)
    engine = models.build_engine(args, layout, kv_blocks=layout.blocks(models.context_tokens_max(args)))
    profile = measure(engine, budget_s=args.budget_s)
    held, warning = models.exact_numerics(engine, layout)
    fields = msgspec.structs.asdict(profile)
    if args.json:
        described = {
            "model": layout.model,
            "dtype": layout.dtype,
            "exact_numerics": held,
            "numerics_warning": warning,
        }
        print(orjson.dumps({**described, **fields}).decode())
        return 0
    print(f"{layout.model}, {layout.dtype}, {layout.numerics} numerics, {args.threads} thread(s)")
    print(
        f"  prefill of n tokens, p of them cached: {profile.prefill_base_ns / 1e6:.2f} ms"
        f" + {profile.prefill_per_token_ps / 1e9:.4f} ms·(n-p) + {profile.prefill_per_token2_fs / 1e12:.3e} ms·(n²-p²)"
    )
    print(
        f"  decode step: {profile.decode_base_ns / 1e6:.2f} ms + {profile.decode_per_sequence_ns / 1e6:.3f} ms·batch"
        f" + {profile.decode_per_context_token_ps / 1e9:.3e} ms·context tokens"
    )
    if held:
        print(
            f"  {warning or 'exact numerics hold: again, from a cache and in a batch the same bits as alone'}"
        )
    return 0
