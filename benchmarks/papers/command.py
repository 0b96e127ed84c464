"""`halfmoon experiments`: the papers' tables and plots again, into one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from benchmarks.papers.experiments.runner import Context, Experiment, Section
from halfmoon.cli.options import OptionInvalid, add_config
from halfmoon.cli.simulation.simulate import DEFAULT_TRACE, interruptible

SYNTHETIC_TRACE = "benchmarks/traces/synthetic_trace.jsonl.zst"
HEAD = """# The papers' results, simulated

Written by `halfmoon experiments`; run again it gives the same bytes. The conductor's core is the one that runs live,
over simulated workers, stores and links; Lamina, Infinite-LLM and SARATHI have no conductor there, and are models of
their own, SARATHI's with the batch former of the workers.
Sources: Mooncake, arXiv 2407.00079 v3 and FAST'25; Lamina, arXiv 2405.01814 v2; Infinite-LLM, arXiv 2401.02669 v2;
SARATHI, arXiv 2308.16369; Sarathi-Serve, arXiv 2403.02310; SemShareKV, arXiv 2509.24832.
Constants come from
hardware profiles (at the end) and none was fitted to a result. TTFT and TBT as in the papers; a request's TBT is the
mean of its longest 10 % of token intervals. A verdict in capitals is a disagreement.
"""


NAMES = (
    "hits",
    "reuse",
    "ttft",
    "ttft-by-speed",
    "gpu-time",
    "global-local",
    "bandwidth",
    "capacity",
    "capacity-synthetic",
    "better",
    "elsewhere",
    "overload",
    "admissions",
    "split",
    "decode-speed",
    "prediction",
    "corrections",
    "lamina",
    "infinite-llm",
    "sarathi",
    "sarathi-parts",
    "sarathi-ratio",
    "sarathi-pipeline",
    "elastic",
    "cpp",
    "similar",
)


def experiments() -> dict[str, Experiment]:
    """All of them, by name. Imported late: they draw with matplotlib, whose lack is told before any is played."""
    import halfmoon.conductor.simulation.plots  # noqa: F401
    from benchmarks.papers.experiments import ablations as why
    from benchmarks.papers.experiments import (
        attention,
        batching,
        cache,
        corrections,
        lending,
        load,
        similar,
        stages,
    )
    from benchmarks.papers.experiments import elastic as roles

    return {
        "hits": cache.block_hits,
        "reuse": cache.equal_memory,
        "ttft": cache.ttft_by_policy,
        "ttft-by-speed": why.ttft_by_speed,
        "gpu-time": cache.prefill_gpu_time,
        "global-local": cache.global_against_local,
        "bandwidth": cache.bandwidth,
        "capacity": load.capacity,
        "capacity-synthetic": load.capacity_synthetic,
        "better": load.better,
        "elsewhere": why.elsewhere,
        "overload": load.overload,
        "admissions": why.admissions,
        "split": load.split,
        "decode-speed": why.decode_speed,
        "prediction": load.prediction,
        "corrections": corrections.corrections,
        "lamina": attention.lamina,
        "infinite-llm": lending.infinite_llm,
        "sarathi": batching.sarathi_capacity,
        "sarathi-parts": batching.sarathi_ablation,
        "sarathi-ratio": batching.sarathi_ratio,
        "sarathi-pipeline": batching.sarathi_pipeline,
        "elastic": roles.elastic,
        "cpp": stages.cpp,
        "similar": similar.similar,
    }


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--trace", metavar="FILE", default=DEFAULT_TRACE)
    parser.add_argument("--synthetic-trace", metavar="FILE", default=SYNTHETIC_TRACE)
    parser.add_argument(
        "--out", metavar="DIR", default="results", help="DIR/experiments.md, and plots beside it"
    )


async def run(args: argparse.Namespace) -> int:
    for name in args.names:
        if name not in NAMES:
            raise OptionInvalid(f"experiments: there is no {name}; there is {', '.join(NAMES)}")
    known = experiments()
    out = Path(args.out)
    folder = out / "experiments"
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(
        Path(args.trace),
        folder,
        lambda text: print(text, file=sys.stderr, flush=True),
        synthetic=Path(args.synthetic_trace),
    )
    complete = True
    with interruptible():
        try:
            for name in args.names or NAMES:
                print(name, file=sys.stderr, flush=True)
                # Each is kept as it is found, so that one can be made anew, or the run be interrupted.
                (folder / f"{name}.json").write_bytes(
                    msgspec.json.format(msgspec.json.encode(known[name](context)))
                )
        except KeyboardInterrupt:
            complete = False
            print("interrupted: what was found is written, the rest is marked", file=sys.stderr)
    (out / "experiments.md").write_text(page(folder))
    print(f"wrote {out / 'experiments.md'}")
    return 0 if complete else 130


def page(folder: Path) -> str:
    """All that was found so far as Markdown; what was not is marked."""
    from halfmoon.conductor.simulation.profiles import PROFILES

    parts = [HEAD]
    for name in NAMES:
        file = folder / f"{name}.json"
        if not file.exists():
            parts.append(f"## {name}\n\nNOT RUN: this report is partial.\n")
            continue
        section = msgspec.json.decode(file.read_bytes(), type=Section)
        lines = [f"## {section.title}", "", section.setting, ""]
        lines.append("| " + " | ".join(section.columns) + " |")
        lines.append("| " + " | ".join("---" for _ in section.columns) + " |")
        lines += ["| " + " | ".join(row) + " |" for row in section.rows]
        lines += ["", *(f"- {reason}" for reason in section.why)]
        lines += ["", *(f"![{section.title}](experiments/{plot})" for plot in section.plots)]
        parts.append("\n".join(lines).rstrip() + "\n")
    lines = ["## Hardware profiles", ""]
    for profile in PROFILES.values():
        cost = profile.cost
        lines.append(
            f"- **{profile.name}**: prefill {cost.prefill_base_ns / 1e6:.2f} ms + "
            f"{cost.prefill_per_token_ps / 1e6:.2f} µs·(n-p) + {cost.prefill_per_token2_fs / 1e6:.3f} ns·(n²-p²); "
            f"step {cost.decode_base_ns / 1e6:.2f} ms + {cost.decode_per_sequence_ns / 1e6:.3f} ms·B + "
            f"{cost.decode_per_context_token_ps / 1e3:.1f} ns·context"
        )
        lines += [f"  - {note}" for note in profile.notes]
    parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
