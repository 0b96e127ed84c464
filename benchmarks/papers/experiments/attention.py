"""Experiments about attention that runs elsewhere: Lamina's configurations over its traces."""

from __future__ import annotations

import random
import statistics
from math import log, sqrt

import msgspec

from benchmarks.papers.attention_pipeline import (
    LayerTimes,
    Pipeline,
    Use,
    bubbles_ns,
    conflicts,
)
from benchmarks.papers.devices import DEVICES, MODELS, Deployment, degrees_of_parallelism
from benchmarks.papers.experiments.runner import Context, Section
from benchmarks.papers.lamina import simulate_lamina
from benchmarks.papers.plots import bars
from benchmarks.papers.report import PoolFigures
from halfmoon.conductor.simulation.report import Objectives
from halfmoon.conductor.simulation.trace import Arrival

#: Lamina's configurations: model, model and attention devices (H100, H20), and the baseline's H100.
CONFIGURATIONS = (("llama-33b", 1, 2, 2), ("llama-65b", 2, 4, 4), ("llama3-70b", 2, 4, 4))
#: Mean prompt and answer as published with Lamina, then medians. Azure's medians are Splitwise's (ISCA'24, section 3).
#: None are published for Kimi's tool and agent trace: they are as far below its means as those of Kimi's conversation.
LENGTHS = {
    "Azure-Conv": (1154.7, 211.1, 1020.0, 129.0),
    "Azure-Code": (2047.8, 27.9, 1500.0, 13.0),
    "Kimi-TA": (8560.0, 182.1, 4914.0, 131.0),
}
TRACES = ("Azure-Conv", "Azure-Code", "Kimi-Conv", "Kimi-TA")
#: Requests of a run: as many as fill Lamina's KVCache so many times, within bounds.
FILLS, REQUESTS_MIN, REQUESTS_MAX = 8, 2_000, 6_000


def lengths(context: Context, trace: str, count: int) -> list[Arrival]:
    """`count` requests that are all there at the beginning: the repository's trace, or drawn log-normal (seed 0)."""
    draw = random.Random(0)
    if trace == "Kimi-Conv":
        chosen = draw.sample(context.arrivals, min(count, len(context.arrivals)))
        return [
            Arrival(at_ns=0, prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens)
            for one in chosen
        ]
    prompt, answer, prompt_median, answer_median = LENGTHS[trace]
    return [
        Arrival(
            at_ns=0,
            prompt_tokens=_log_normal(draw, prompt, prompt_median),
            output_tokens=_log_normal(draw, answer, answer_median),
        )
        for _ in range(count)
    ]


def _log_normal(draw: random.Random, mean: float, median: float) -> int:
    return max(1, round(draw.lognormvariate(log(median), sqrt(2 * log(mean / median)))))


class _Cell(msgspec.Struct):
    """One configuration over one trace: each deployment's figures."""

    model: str
    trace: str
    mean_context: int
    devices: tuple[int, int]
    baseline: PoolFigures
    two: PoolFigures
    #: One group, and nothing overlapped.
    serial: PoolFigures
    three: PoolFigures


def lamina(context: Context) -> Section:
    """Lamina's three configurations over its four traces, against devices of one kind at about the same price."""
    cells = [_cell(context, trace, *shape) for shape in CONFIGURATIONS for trace in TRACES]
    rows = [_row(cell) for cell in cells]
    gains = [cell.two.tokens_s / cell.baseline.tokens_s for cell in cells]
    batches = [cell.two.batch / cell.baseline.batch for cell in cells]
    serials = [cell.serial.tokens_s / cell.baseline.tokens_s for cell in cells]
    above = sum(gain > 1.1 for gain in gains)
    rows.append(
        [
            "**ours, mean**",
            "",
            f"{statistics.mean(batches):.2f}",
            f"{statistics.mean(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})",
            "",
            "",
            f"{statistics.mean(serials):.2f} ({min(serials):.2f} to {max(serials):.2f})",
            "",
        ]
    )
    rows.append(["**paper**", "", "2.39", "1.16 to 1.90", "higher", "higher", "not given", ""])
    plot = bars(
        context.plot("lamina"),
        [f"{cell.model}\n{cell.trace}" for cell in cells],
        {"two groups in turn": gains, "one group, nothing overlapped": serials},
        ylabel="tokens/s over the baseline's",
        title="Lamina's configurations, against H100s alone",
        level=1.0,
    )
    return Section(
        title="Lamina: attention on devices of its own",
        setting="Decode alone, prefill removed, as many requests waiting as there are; figures while they wait and the "
        "KVCache is full. LLaMA-33B on 1 H100 + 2 H20 ($20.32 an hour) against 2 H100 ($22.12); LLaMA-65B and "
        "LLaMA3-70B on 2 H100 + 4 H20 ($40.64) against 4 H100 ($44.24); prices are the paper's. The same roofline for "
        "all: 60 % of peak FLOP/s, 80 % of memory bandwidth, 90 % of memory, two all-reduces of 20 µs a layer where "
        "weights lie on several devices. Lengths: Kimi-Conv is the repository's trace; the others are drawn log-normal "
        "with the published means (and Splitwise's medians for Azure), seed 0. Columns compare with the baseline.",
        columns=[
            "model, trace",
            "batch",
            "batch ratio",
            "tokens/s",
            "tokens a dollar",
            "TBT, ms",
            "one group, nothing overlapped",
            "three groups, two replicas: tokens/s, a dollar",
        ],
        rows=rows,
        why=_why(cells, above),
        plots=[plot.name],
    )


def _why(cells: list[_Cell], above: int) -> list[str]:
    h100, h20 = DEVICES["h100"], DEVICES["h20"]
    ruled = []
    for cell in cells:
        chosen = degrees_of_parallelism(
            MODELS[cell.model],
            h100,
            h20,
            batch=int(cell.two.batch / 2),
            context_tokens=cell.mean_context,
            groups=2,
        )
        ruled.append((chosen.model_devices, chosen.attention_devices) == cell.devices)
    return [
        f"Throughput is above 1.1 times the baseline's in {above} of {len(cells)} cells. The batch grows as the "
        "room for KVCache does, which is where the paper's 2.39 comes from too.",
        "The gain is at the lower end of the paper's. Weights are read once for each of the two groups, which takes "
        "longer than attention to half of the KVCache: the attention pool waits, and two groups gain little over one "
        "whose queries go first. The paper measured a real vLLM, whose steps have costs that no roofline knows.",
        "LLaMA3-70B over Azure's short requests is bound by compute: hundreds of rows a group, on half of the "
        "baseline's H100s. Long requests over models without grouped heads fit four times or so, and "
        "what does not fit whole is lost.",
        "The control: one group whose steps wait for the network and for attention is about as fast as the baseline, "
        "though its batch is the larger one too.",
        _balanced(),
        f"The paper's rule, asked for half of the batch as a group, gives its own (a, b) in {sum(ruled)} of "
        f"{len(ruled)} cells: the room for a whole batch of mean length decides.",
    ]


def _balanced(groups: int = 3, layers: int = 60) -> str:
    """Two steps of the pipeline, event by event, where attention takes 1/(n - 1) of the slice's time."""
    uses: list[Use] = []
    pipeline = Pipeline(layers, groups, uses=uses)
    slice_ns = 600_000.0
    attention_ns = slice_ns / (groups - 1)
    times = [LayerTimes(slice_ns, 0.0, attention_ns)] * groups
    first = pipeline.step([place * attention_ns for place in range(groups)], times)
    second = pipeline.step(first, times)
    idle_ns = bubbles_ns(uses, groups * slice_ns, groups * slice_ns + second[0] - first[0])
    return (
        f"{groups} groups over {groups - 1} replicas at balance (t_a = t_m/{groups - 1}), begun one t_a apart: "
        f"{conflicts(uses)} conflicts in {len(uses)} turns of devices, bubbles of {idle_ns:.0f} ns in a step."
    )


def _cell(context: Context, trace: str, model: str, weights: int, attention: int, alone: int) -> _Cell:
    served = MODELS[model]
    h100, h20 = DEVICES["h100"], DEVICES["h20"]
    two = Deployment(
        model=served,
        model_device=h100,
        model_devices=weights,
        attention_device=h20,
        attention_devices=attention,
        groups=2,
    )
    drawn = lengths(context, trace, REQUESTS_MAX)
    mean = statistics.mean(one.prompt_tokens + one.output_tokens for one in drawn)
    arrivals = drawn[: max(REQUESTS_MIN, int(FILLS * two.kv_tokens / mean))]

    def figures(deployment: Deployment) -> PoolFigures:
        context.say(f"  {model} {trace} groups {deployment.groups} on {deployment.attention_devices}")
        report = simulate_lamina(arrivals, deployment, slo=Objectives())
        if not report.complete:
            raise KeyboardInterrupt  # half a run is no result
        return report.pools

    change = msgspec.structs.replace
    return _Cell(
        model=model,
        trace=trace,
        mean_context=int(statistics.mean(one.prompt_tokens + one.output_tokens / 2 for one in arrivals)),
        devices=(weights, attention),
        baseline=figures(change(two, model_devices=alone, attention_devices=0, groups=1)),
        two=figures(two),
        serial=figures(change(two, groups=1, query_first=False)),
        three=figures(change(two, groups=3)),
    )


def _row(cell: _Cell) -> list[str]:
    base, two, three = cell.baseline, cell.two, cell.three
    return [
        f"{cell.model}, {cell.trace}",
        f"{base.batch:.1f} → {two.batch:.1f}",
        f"{two.batch / base.batch:.2f}",
        f"{two.tokens_s / base.tokens_s:.2f}",
        f"{two.tokens_per_dollar / base.tokens_per_dollar:.2f}",
        f"{base.step_ms:.0f} → {two.step_ms:.0f}",
        f"{cell.serial.tokens_s / base.tokens_s:.2f}",
        f"{three.tokens_s / base.tokens_s:.2f}, {three.tokens_per_dollar / base.tokens_per_dollar:.2f}",
    ]
