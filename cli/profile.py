"""`halfmoon profile`: the costs of prefill and decode on this machine, in the conductor's cost model."""

from __future__ import annotations

import argparse
import os

import msgspec
import orjson

from halfmoon.cli import model as models
from halfmoon.cli.declared import add_options, options_of
from halfmoon.cli.options import add_config
from halfmoon.cli.shared_options import ModelOptions
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.workers.options import WorkerOptions


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ModelOptions)
    add_config(parser)
    add_options(parser, WorkerOptions, only=("attention_kernel", "threads"))
    parser.add_argument("--budget-s", type=float, default=30.0, help="how long to measure")
    parser.add_argument("--json", action="store_true")


def of_parts(cost: CostProfile) -> list[str]:
    """The table of a decode step's parts, to read."""
    if not cost.attention_token_ps:
        return ["  a step's parts: not measured, as attention runs elsewhere in exact numerics on CPUs only"]
    lines = [
        f"  without attention: {cost.linear_group_ns / 1e6:.2f} ms·groups + {cost.linear_row_ns / 1e6:.3f} ms·batch,"
        f" in groups of up to {cost.group_rows}",
        f"  attention, here or elsewhere: {cost.attention_group_ns / 1e6:.2f} ms·groups"
        f" + {cost.attention_row_ns / 1e6:.3f} ms·batch + {cost.attention_token_ps / 1e9:.3e} ms·context tokens",
    ]
    linear_ns = cost.linear_ns(1, cost.group_rows)
    for tokens in (1_000, 4_000):
        attention_ns = cost.attention_ns(1, cost.group_rows, cost.group_rows * tokens)
        keep_up = max(1, -(-attention_ns // max(1, linear_ns)))
        lines.append(f"  attention workers that keep up, at {tokens} tokens a sequence: {keep_up}")
    if cost.channel_trip_ns:
        lines.append(
            f"  channel on this host: {cost.channel_trip_ns / 1e3:.1f} µs a round trip"
            f" + {cost.channel_byte_ps / 1e3:.3f} ns·bytes, up and down"
        )
    return lines


async def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", str(options_of(WorkerOptions, args).threads))
    from halfmoon.workers.profiler import measure

    layout = models.layout_of(args)
    engine = models.build_engine(args, layout, kv_blocks=layout.blocks(models.context_tokens_max(args)))
    held, warning = models.prepare_numerics(engine, layout)
    profile = measure(engine, budget_s=args.budget_s)
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
    print("\n".join(of_parts(profile)))
    if held:
        print(
            f"  {warning or 'exact numerics hold: again, from a cache and in a batch the same bits as alone'}"
        )
    return 0
