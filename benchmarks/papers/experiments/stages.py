"""Chunked pipeline parallelism: the first token of long prompts by how many prefill workers compute them together."""

from __future__ import annotations

from benchmarks.papers.experiments.runner import Context, S, Section
from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.trace import Arrival

TOKENS = (8_192, 16_384, 32_768, 65_536, 131_072)
GROUPS = (1, 2, 4)
#: Of one worker's first token, at the longest prompt on four.
SHARE_MAX = 0.35
PROFILE = LLAMA3_A800
COLUMNS = [
    "prompt",
    *(f"TTFT on {size}, s" for size in GROUPS),
    *(f"of one, {size}" for size in GROUPS[1:]),
    *(f"predicted off by, {size}" for size in GROUPS),
    "CPP ours, GB",
    "CPP at best, GB",
    "ring attention, GB",
    "all-reduce, GB",
]


def cpp(context: Context) -> Section:
    """Each prompt alone, on four idle prefill workers of which so many may be taken."""
    rows, longest = [], 1.0
    for tokens in TOKENS:
        found = {size: _run(context, tokens, size) for size in GROUPS}
        ttft_s = {size: outcome.ttft_ns / S for size, (outcome, _) in found.items()}
        off = [outcome.predicted_ttft_ns / outcome.ttft_ns - 1 for outcome, _ in found.values()]
        longest = ttft_s[GROUPS[-1]] / ttft_s[1]
        rows.append(
            [
                f"{tokens:,}",
                *(f"{ttft_s[size]:.2f}" for size in GROUPS),
                *(f"{ttft_s[size] / ttft_s[1]:.3f}" for size in GROUPS[1:]),
                *(f"{share:+.1%}" for share in off),
                *(f"{size:.2f}" for size in traffic_gb(tokens, GROUPS[-1], _between(found[GROUPS[-1]][1]))),
            ]
        )
    met = "MET" if longest <= SHARE_MAX else "NOT MET"
    return Section(
        title="Chunked pipeline parallelism: first tokens of long prompts",
        setting=f"{GROUPS[-1]} prefill workers and a decode worker of {PROFILE.name}, each prompt alone and cold; the "
        f"core forms the group (`--prefill-group`), chooses the chunks, and says when. Bytes are between the prefill "
        f"nodes of a group of {GROUPS[-1]}, for the whole prompt; the last three columns are on paper.",
        columns=COLUMNS,
        rows=rows,
        why=[
            f"The aim: {TOKENS[-1]:,} tokens on {GROUPS[-1]} workers in at most {SHARE_MAX} of one worker's time. "
            f"{longest:.3f}, {met}.",
            "The paper (ARXIV, section 5.1) gives no figure of CPP's first tokens; it says that its traffic is only at "
            "the stages' borders, that it needs no change of groups for short prompts, and compares with sequence "
            "parallelism in words. So there is nothing published to stand beside these times.",
            "More than 1/4 remains because the pipeline fills and empties (its last chunk goes through one stage after "
            "the other, and it is the dearest one: attention grows with what is before it), because 80 layers' weights "
            "are read once for each chunk, and by what hops take. Shorter chunks fill faster and read more often; the "
            "core takes the best of 512 tokens times a power of two.",
            "Ours moves more than CPP must: the KV of all other stages comes over the last one's link, from where it "
            "is pushed and committed as for one worker, and residuals between two other stages go by way of it. The "
            "push to the decode node is in no column. At best only residuals cross, once a border.",
            "On paper, for n workers, T tokens: CPP at best (n - 1)·T·(bytes of a residual); ring attention "
            "(n - 1)·T·(KV bytes of a token), each worker's KV passing all others; sequence parallelism by two "
            "all-reduces a layer (or as many gathers and scatters) 4·(n - 1)·T·(bytes of a residual)·layers.",
            "Predicted: by the core when the order was given, in closed form; the simulated workers go chunk by chunk. "
            "On one worker both are the profile's formula.",
        ],
    )


def traffic_gb(tokens: int, size: int, ours_bytes: int) -> list[float]:
    """Between the nodes of a group: as simulated, CPP at best, ring attention, and all-reduces of activations."""
    border = (size - 1) * tokens * PROFILE.activation_bytes
    ring = (size - 1) * tokens * PROFILE.token_bytes
    return [one / 1e9 for one in (ours_bytes, border, ring, 4 * border * PROFILE.layers)]


def _between(report: SimulationReport) -> int:
    return report.traffic.bytes_moved - report.traffic.bytes_pushed - report.traffic.bytes_fetched


def _run(context: Context, tokens: int, size: int) -> tuple[Outcome, SimulationReport]:
    outcomes: dict[str, Outcome] = {}
    report = context.run(
        cluster=ClusterShape(prefill=GROUPS[-1], decode=1),
        profile=PROFILE,
        slo=Objectives(ttft_ns=1_000 * S, tbt_ns=S),
        arrivals=[Arrival(at_ns=S, prompt_tokens=tokens, output_tokens=2)],
        outcomes=outcomes,
        prefill_group=size,
    )
    return outcomes["r0"], report
