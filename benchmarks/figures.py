"""`python benchmarks/figures.py`: the table of figures (`docs/figures.md`) and the list of kept results, of `results/`.

It writes "older" wherever a page cites a result whose modules changed since it was measured, and the table of options
(`docs/options.md`) by the commands themselves. `make docs` runs it; a test compares.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured import RESULTS, ROOT, changed
from halfmoon.cli.commands import parser_of

LIST = RESULTS / "README.md"
#: Pages in which kept results are cited: `results/NAME.json`.
PAGES = (
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "benchmarks/papers/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
#: The commands whose options docs/options.md lists; the four roles of workers have the same ones.
OPTIONS_OF = ("up", "conductor", "store", "prefill", "frontend", "adapt")
#: A table that is made from results, by its name in `TABLES`.
TABLE = re.compile(r"(<!-- table of (\w+), by make docs -->\n).*?(<!-- end of table -->)", re.DOTALL)
#: "into `results/NAME.json`" names a place and no figure.
CITED = re.compile(r"(?<!into )(`results/([a-z0-9_/-]+\.(?:json|md))`)(, older\b)?")
#: What one program simulates has its records in one file.
EXPERIMENTS = "experiments/measured.json"

Result = Mapping[str, Any]


class Row(NamedTuple):
    """One line of the table of figures."""

    about: str
    result: str
    figure: Callable[[Result], str]


@cache
def read(name: str) -> Any:
    """`results/NAME`."""
    return orjson.loads((RESULTS / name).read_bytes())


def record_of(name: str) -> Result:
    """What `beside` said when `results/NAME` was measured."""
    if not name.startswith("experiments/"):
        record: Result = read(name)["beside"]
        return record
    stem = Path(name).stem
    (record,) = (each["beside"] for each in read(EXPERIMENTS) if stem in each["names"])
    return record


@cache
def older(name: str) -> tuple[str, ...]:
    """The modules that changed since `results/NAME` was measured; none: it is of this code. A page stands for all that
    is on it.
    """
    if name == "experiments.md":
        return tuple(
            {module: None for one in names() if one.startswith("experiments/") for module in older(one)}
        )
    return tuple(changed(record_of(name)["modules"]))


def names() -> Iterator[str]:
    """Every kept result, by its path below `results/`."""
    for path in sorted([*RESULTS.glob("*.json"), *RESULTS.glob("experiments/*.json")]):
        if path != RESULTS / EXPERIMENTS:
            yield path.relative_to(RESULTS).as_posix()


def _reuse(result: Result) -> str:
    reuse = result["reuse"]
    ratio, cold, fetched = reuse["ratio"], reuse["cold_ttft_ms"]["p50"], reuse["fetched_ttft_ms"]["p50"]
    return (
        f"{ratio['p50']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f} in {ratio['n']} runs): "
        f"{fetched:,.0f} ms against {cold:,.0f} ms"
    )


def _wait(result: Result) -> str:
    wait = result["wait_for_kv_ms"]
    return f"{wait['streamed']['p50']:.1f} ms against {wait['all_at_the_end']['p50']:.0f} ms"


def _control_plane(over: str, prompt_tokens: int) -> Callable[[Result], str]:
    def figure(result: Result) -> str:
        (row,) = (
            row
            for row in result["rows"]
            if (row["over"], row["prompt_tokens"], row["max_tokens"]) == (over, prompt_tokens, 1)
        )
        rates = row["requests_per_s_at_32_all"]
        return (
            f"{row['first_token_p50_ms_at_1']:.1f} ms; {row['requests_per_s_at_32']:,.0f}/s "
            f"({min(rates):,.0f} to {max(rates):,.0f}); the first token takes "
            f"{row['first_token_over_bare']:.0f} times a bare request of the same server "
            f"({row['bare_ms']:.2f} ms that day)"
        )

    return figure


def _transfer(of: str, against: str, kind: str = "speed") -> Callable[[Result], str]:
    def figure(result: Result) -> str:
        for line in result["lines"]:
            if (line["of"], line["against"], line["figure"]) == (of, against, kind):
                return f"{line['ratio']:.2f}"
        return "not measured: its package was not there"

    return figure


def _numerics(result: Result) -> str:
    ratios = {row["what"]: row["ratio"]["p50"] for row in result["rows"] if row["dtype"] == "float32"}
    return "; ".join(f"{what}: {100 * (ratio - 1):+.0f} %" for what, ratio in ratios.items())


def _live(result: Result) -> str:
    return ", ".join(f"{100 * run['mean_ttft_ms']['off']:+.0f} %" for run in result["runs"])


def _start(result: Result) -> str:
    figures = result["figures"]
    ratios = [
        figures[name]["here_over_there"]["p50"] for name in ("ready_s", "ready_cpu_s", "memory_but_pools_mib")
    ]
    back = figures["killed_worker_back_s"]
    told = "; ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"{told}; {back['here']['p50']:.1f} s against {back['there']['p50']:.1f} s"


def _replay(result: Result) -> str:
    return f"{result['events_per_cpu_s_median']:,.0f} events a second of CPU ({result['events']:,} events)"


def _better(result: Result) -> str:
    gains = [float(row[4].rstrip("%")) for row in result["rows"]]
    theirs, ours = ([float(row[column]) for row in result["rows"]] for column in (5, 6))
    return f"{min(gains):+.0f} to {max(gains):+.0f} %; {max(ours):.0f} s against {max(theirs):.0f} s"


def _policies(result: Result) -> str:
    mean, p90 = result["worst_mean"], result["worst_p90"]
    agents = result["ahead_percent"]["recorded agents"]
    alone, groups = (min(agents[name].values()) for name in ("halfmoon", "halfmoon in groups"))
    return f"{mean['percent']:+.1f} %, {p90['percent']:+.1f} %; {alone:.0f} %, in groups {groups:.0f} %"


def _policies_mixed(result: Result) -> str:
    return ", ".join(
        f"{result[which]['percent']:+.1f} %" for which in ("worst_answer", "worst_mean", "worst_p90")
    )


def _capacity(result: Result) -> str:
    def gains(row: Result) -> str:
        return ", ".join(f"{one['mean']:+.0f} %" for one in row["gain_percent"].values())

    return "; ".join(f"{row['kind']} {gains(row)}" for row in result["rows"])


def _dynamo_edge(result: Result) -> str:
    def at(connections: int) -> str:
        ratios = [row["ratio"] for row in result["rows"] if row["connections"] == connections]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    return f"{at(32)} at 32 connections, {at(1)} at one"


def _cpu_by_process(result: Result) -> str:
    row = next(
        row for row in result["rows"] if (row["kind"], row["tokens"], row["connections"]) == ("ids", 128, 32)
    )

    def of(name: str) -> str:
        parts = sorted(row[name]["cpu_ms_of"].items(), key=lambda part: -part[1])
        return f"{name} " + ", ".join(f"{process} {ms:.2f}" for process, ms in parts if ms)

    return f"{of('halfmoon')}; {of('dynamo')}"


def _cpu_engines(result: Result) -> str:
    def at(dtype: str) -> str:
        # An engine that was not there has no type.
        ours = next(row for row in result["rows"] if (row["engine"], row.get("dtype")) == ("exact", dtype))
        best = ours["against_best"].values()
        return f"{dtype} " + ", ".join(f"{each['ratio']['p50']:.2f} of {each['peer']}" for each in best)

    return f"{at('float32')}; {at('bfloat16')}"


def _products(result: Result) -> str:
    def at(dtype: str) -> str:
        rows = [
            row
            for row in result["rows"]
            if (row["dtype"], row["shape"]) == (dtype, result["rows"][0]["shape"])
        ]
        library = rows[0]["kernels"]["library"]
        return f"{dtype}, to {library}: " + ", ".join(
            f"{row['rows']} rows {row['of_bound']['p50']:.2f} and {row['ratio']['p50']:.2f}" for row in rows
        )

    return f"{at('float32')}; {at('bfloat16')}"


def _engine_fleet(result: Result) -> str:
    step, cpu = result["step_us"], result["cores"]["conductors"]
    return (
        f"{result['reached_per_s']:.0f} of {result['offered_per_s']:.0f} requests/s, {result['lost']} lost; a decision "
        f"takes {step['p50']:.0f} µs of CPU, {step['p99']:.0f} at p99, the conductor {cpu:.2f} of a core"
    )


def _generate(result: Result) -> str:
    def of(row: Result) -> str:
        each = row["tokens_per_s"]
        here, there, ratio = each["here"], each["there"], each["here_over_there"]
        return (
            f"{row['numerics']} {here['p50']:.1f} for {there['p50']:.1f}, {ratio['p50']:.2f} "
            f"({ratio['min']:.2f} to {ratio['max']:.2f})"
        )

    return f"to {result['against']}: {'; '.join(map(of, result['rows']))}"


def _turns(result: Result) -> str:
    ratios = "; ".join(
        f"{row['figure']}: {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        for row in result["rows"]
    )
    return f"to {result['against']}: {ratios}"


def _tokens_reused(result: Result) -> str:
    by_policy = {row[0]: row[2] for row in result["rows"]}
    bound = next(share for name, share in by_policy.items() if name.startswith("one pool"))
    return f"{by_policy['halfmoon']} (one ideal pool: {bound})"


def _worlds(result: Result) -> str:
    return f"{result['seeds']:,} worlds, {result['events']:,} events; {len(result['failures'])} failed"


def _fuzz(result: Result) -> str:
    return f"{result['inputs']:,} inputs for {len(result['targets'])} targets; {result['found']} open"


ROWS = (
    Row(
        "first token of 2,000 tokens, 1,900 of them cached on another node, to cold", "kv_reuse.json", _reuse
    ),
    Row("wait for KV after prefill: pushed layer by layer; all at the end", "kv_reuse.json", _wait),
    Row(
        "control plane alone, NATS, 8-token prompt: first token; requests at 32 at a time",
        "control_plane.json",
        _control_plane("nats", 8),
    ),
    Row("the same, HTTP, 128-token prompt", "control_plane.json", _control_plane("http", 128)),
    Row(
        "the same, HTTP, 12,288 tokens, of which tokenizing is most",
        "control_plane.json",
        _control_plane("http", 12_288),
    ),
    Row(
        "requests/s over HTTP, streamed, to NVIDIA Dynamo's, neither computing, by turns: ten kinds of load",
        "dynamo_edge.json",
        _dynamo_edge,
    ),
    Row(
        "ms of CPU a request of 128 token ids at 32 connections, by kind of process",
        "dynamo_edge.json",
        _cpu_by_process,
    ),
    Row(
        "exact numerics to the fastest of vLLM, transformers and llama.cpp on one core with AVX-512, time: first token "
        "of 512 and of 2,000 tokens, a step of 1 and of 8 sequences",
        "cpu_engines.json",
        _cpu_engines,
    ),
    Row("the same on a core with AMX", "cpu_engines_amx.json", _cpu_engines),
    Row("the same on a core with AVX2 alone", "cpu_engines_avx2.json", _cpu_engines),
    Row(
        "products of cold weights by the row kernel: speed to what memory or multiply-adds allow one core, and time to "
        "the library's product",
        "products.json",
        _products,
    ),
    Row("100 engines behind adapters, a fifth of which lie", "engine_fleet.json", _engine_fleet),
    Row(
        "64 MiB of blocks over TCP: speed to a plain socket", "transfer.json", _transfer("tcp_get", "socket")
    ),
    Row("speed to Mooncake's store over TCP", "transfer.json", _transfer("tcp_get", "mooncake_get")),
    Row(
        "CPU seconds to Mooncake's store over TCP",
        "transfer.json",
        _transfer("tcp_get", "mooncake_get", "cpu"),
    ),
    Row(
        "RDMA READ of 1 MiB slices, soft-RoCE, to `ib_read_bw`",
        "rdma.json",
        lambda result: f"{result['ratio']['read against ib_read_bw']:.2f}",
    ),
    Row("simulated against live, mean TTFT of a slice of the trace, each run", "simulation_live.json", _live),
    Row(
        "`halfmoon up`, all processes forked, to d32a85b, workers alone: ready, CPU s to it, memory but for pools; "
        "a killed worker is back",
        "start.json",
        _start,
    ),
    Row(
        "speed to that of an older commit, by turns (median, and least and most of the rounds)",
        "turns.json",
        _turns,
    ),
    Row("replay of a log, one core", "replay.json", _replay),
    Row("what exact numerics cost, f32, with AVX-512", "numerics.json", _numerics),
    Row("the same with AVX2", "numerics_avx2.json", _numerics),
    Row(
        "`halfmoon generate` of 64 tokens on the default cluster: tokens/s to those of an older commit, by turns",
        "generate.json",
        _generate,
    ),
    Row(
        "simulated: capacity against the papers' own rule, two sizes of cluster; p90 TTFT at that rule's limit",
        "experiments/better.json",
        _better,
    ),
    Row(
        "simulated: TTFT of policy `halfmoon` behind the best of four others in its worst cell of 32, mean and p90; "
        "ahead of it in the mean on recorded agents' sessions, alone and in groups of prefill workers",
        "policies.json",
        _policies,
    ),
    Row(
        "simulated, 16 mixed workers: policy `halfmoon` behind the best of four others in its worst cell of 32: the "
        "whole answer, TTFT in the mean and at p90",
        "policies_mixed.json",
        _policies_mixed,
    ),
    Row(
        "simulated: highest speed at which 90 % hold their objectives, to that under the papers' own rule: two fixed "
        "pools; prefill in groups; roles by load; mixed workers",
        "policy_capacity.json",
        _capacity,
    ),
    Row(
        "agents' sessions in a closed loop on two real clusters: TTFT to that under the papers' rule, mean and p90",
        "sessions_live.json",
        lambda result: f"{result['ratio']['mean']:.2f}, {result['ratio']['p90']:.2f}",
    ),
    Row(
        "simulated: share of tokens reused, 8 workers × 3,000 blocks",
        "experiments/reuse.json",
        _tokens_reused,
    ),
    Row("chaos: whole clusters of make-believe with faults", "chaos.json", _worlds),
    Row("fuzz: inputs drawn against all that reads what others write", "fuzz.json", _fuzz),
)


def _figures() -> str:
    lines = [f"| {row.about} | {row.figure(read(row.result))} | {_age(row.result)} |" for row in ROWS]
    return "\n".join(["| what | figure | measured |", "| --- | --- | --- |", *lines])


def _transfers() -> str:
    plain, huge = (read(name)["lines"] for name in ("transfer.json", "transfer_huge.json"))
    rows = [
        f"| {one['of']} to {one['against']} | {one['figure']} | {one['ratio']:.2f} | {other['ratio']:.2f} |"
        for one, other in zip(plain, huge, strict=True)
    ]
    return "\n".join(["| what | of | ratio | with huge pages |", "| --- | --- | --- | --- |", *rows])


def _page() -> str:
    def cells(row: Result) -> str:
        ratios = (row[f"{name}_ratio"] for name in ("cpu", "first_token", "requests_per_s"))
        return " | ".join(f"{each['p50']:.2f} ({each['min']:.2f} to {each['max']:.2f})" for each in ratios)

    rows = [
        f"| {row['over'].upper()}, prompt of {row['prompt_tokens']} tokens, answer of {row['max_tokens']} "
        f"| {cells(row)} |"
        for row in read("page.json")["rows"]
    ]
    head = "| open to closed | CPU a request | first token at one | requests/s at 32 |"
    return "\n".join([head, "| --- | --- | --- | --- |", *rows])


def _options() -> str:
    """Each option of `halfmoon up` and of the processes, by its parser: default, processes, meaning."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for command in OPTIONS_OF:
        for action in parser_of(command)._actions:
            if not action.option_strings or action.help == argparse.SUPPRESS:
                continue
            said = action.default not in (None, "", []) and action.default is not False
            default = f"`{action.default}`".replace(f"-{socket.gethostname()}", "-HOST") if said else ""
            choices = "" if action.choices is None or action.metavar else ", ".join(map(str, action.choices))
            meaning = "; ".join(filter(None, (choices, action.help))).replace("|", "\\|")
            row = (action.option_strings[-1], default, meaning)
            rows.setdefault(row, []).append("workers" if command == "prefill" else command)
    lines = [
        f"| `{flag}` | {default} | {', '.join(of)} | {what} |" for (flag, default, what), of in rows.items()
    ]
    return "\n".join(["| option | default | of | meaning |", "| --- | --- | --- | --- |", *lines])


TABLES: Mapping[str, Callable[[], str]] = {
    "figures": _figures,
    "transfers": _transfers,
    "page": _page,
    "options": _options,
}


def _age(name: str) -> str:
    record = record_of(name)
    return f"{record['date'][:10]}, {record['commit']}" + (", older" if older(name) else "")


def listing() -> str:
    """`results/README.md`: each result, on what it was measured, and what changed since."""
    lines = [
        "# Kept results",
        "",
        "Written by `make docs`. Each file says under `beside` on what it was measured: the day, the commit,",
        "the processor, the load average, and the modules, with digests of their code. Where one of these",
        "changed since, the result is **older**: it is true of the commit that it names.",
        "`python benchmarks/NAME.py --save NAME` measures NAME.json anew; `experiments/` is by",
        "`make experiments`, `chaos.json` by `make chaos`, `fuzz.json` by `make fuzz`, `rdma.json` by",
        "`make test-rdma`.",
        "",
        "| result | day | commit | processor | load | older: changed since |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names():
        record = record_of(name)
        since = older(name)
        shown = ", ".join(since[:4]) + (f" and {len(since) - 4} more" if len(since) > 4 else "")
        on = f"{record['date'][:10]} | {record['commit']} | {_machine(name, record)}"
        lines.append(f"| [{name}]({name}) | {on} | {shown or '–'} |")
    return "\n".join(lines) + "\n"


def _machine(name: str, record: Result) -> str:
    """Processor and load."""
    if name.startswith("experiments/"):
        return "any: simulated | –"
    return f"{record['cores']} × {record['cpu']} | {record['load_average'][0]:.1f}"


def written() -> dict[Path, str]:
    """The text that each page has today: its tables of results, and "older" where it cites what is."""
    texts = {page: CITED.sub(_marked, TABLE.sub(_made, page.read_text())) for page in PAGES}
    return {**texts, LIST: listing()}


def _made(found: re.Match[str]) -> str:
    return f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}"


def _marked(cited: re.Match[str]) -> str:
    return cited[1] + (", older" if older(cited[2]) else "")


def main() -> None:
    for page, text in written().items():
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
