"""Our engine beside what else serves this model on a CPU, by turns in one run: time to the first token, and time of a
decode step. Each engine is a process with one thread, all of them on one core, of which one computes at a time.

Ours in exact and in fast numerics; beside it those that are named: HALFMOON_VLLM (its program, or its Python; with
HALFMOON_VLLM_EAGER it does not compile the model, which takes it minutes) and HALFMOON_TRANSFORMERS (a Python that has
it), both with HALFMOON_VLLM_MODEL (a directory that tests/vllm/make_model.py wrote), and HALFMOON_LLAMA_CPP (a Python
that has llama-cpp-python). All have the same weights; `same_tokens` counts which of an engine's likeliest tokens are
those of ours in exact numerics and the same type: bf16 rounds differently.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import engine_ends
from benchmarks.clusters import finish, parsed, parser, spread
from halfmoon.workers.model.loading.files import find_model

MODEL = "smollm2-135m-instruct"
DTYPES = ("float32", "bfloat16")
OURS = ("exact", "fast")
#: What runs of ours in their processes.
COMPUTING = ("workers/model",)
#: The variable that names each, and whether it reads the directory of HALFMOON_VLLM_MODEL.
PEERS = {
    "vllm": ("HALFMOON_VLLM", True),
    "transformers": ("HALFMOON_TRANSFORMERS", True),
    "llama.cpp": ("HALFMOON_LLAMA_CPP", False),
}
DIRECTORY = "HALFMOON_VLLM_MODEL"
PROMPTS, BATCHES = (512, 2000), (1, 8)
#: A process has so long to end by itself.
END_S = 60.0
#: Of each sequence before a decode step.
CONTEXT_TOKENS = 512

Values = dict[str, list[float]]


def python_of(program: str) -> str:
    """`program` where it is a Python, or else the one beside it."""
    path = Path(program)
    return program if path.name.startswith("python") else str(path.with_name("python"))


def absent(engine: str, variables: Mapping[str, str]) -> str:
    """Why the engine is not there; "" where it is."""
    if engine in OURS:
        return ""
    named, reads_directory = PEERS[engine]
    missing = [name for name in (named, *[DIRECTORY] * reads_directory) if not variables.get(name)]
    return f"not there: {' and '.join(missing)} not set" if missing else ""


class Engine:
    """The process of one engine, which computes in one type. `python`: of another checkout of ours."""

    def __init__(self, engine: str, dtype: str, core: int | None, python: str = sys.executable) -> None:
        self.name = f"{engine} {dtype}"
        model = MODEL
        if engine not in OURS:
            named, reads_directory = PEERS[engine]
            python = python_of(os.environ[named])
            model = os.environ[DIRECTORY] if reads_directory else str(find_model(MODEL).path)
        variables = {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"{core or 0}", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        }  # fmt: skip
        bound = [] if core is None else ["taskset", "-c", f"{core}"]
        self._process = subprocess.Popen(
            [*bound, python, engine_ends.__file__, engine, dtype, model],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: its process ended with {self._process.wait(60)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, what: str, **about: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **about}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """It ends with its input; whatever of its own processes is left after that, too."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def engines(
    which: Sequence[tuple[str, str]], core: int
) -> Iterator[dict[tuple[str, str], tuple[Engine, str]]]:
    """The running ones of `which` (engine, type) and their versions, each started when the one before it is ready."""
    with contextlib.ExitStack() as ends:
        running = {}
        for engine, dtype in which:
            one = Engine(engine, dtype, core)
            ends.callback(one.end)
            running[engine, dtype] = (one, str(one.answer()["version"]))
        yield running


def agreeing(tokens: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many tokens of the sequences are the same, up to the first in each that is not, and of how many."""
    same = 0
    for some, others in zip(tokens, ours, strict=True):
        for token, other in zip(some, others, strict=True):
            if token != other:
                break
            same += 1
    return same, sum(map(len, ours))


def best_peer(medians: Mapping[str, float]) -> str:
    """The fastest of `medians`, by engine, that is not ours; "" without one."""
    return min(
        (engine for engine in medians if engine not in OURS), key=lambda each: medians[each], default=""
    )


def against_best(values: Mapping[str, Values]) -> dict[str, dict[str, dict[str, Any]]]:
    """Of each engine of ours and each figure: the best peer, and the ratio to it round by round; below 1: ours is
    faster. `values`: milliseconds of the rounds, by engine and figure, all of one type.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for engine in OURS:
        for figure, ours in values.get(engine, {}).items():
            best = best_peer({each: statistics.median(figures[figure]) for each, figures in values.items()})
            if best:
                ratios = [a / b for a, b in zip(ours, values[best][figure], strict=True)]
                found.setdefault(engine, {})[figure] = {"peer": best, "ratio": spread(ratios)}
    return found


def measure(
    args: Any, which: Sequence[tuple[str, str]]
) -> tuple[dict[tuple[str, str], Values], dict[Any, Any]]:
    """Milliseconds of each round by engine, type and figure; and what is said of each engine and type."""
    drawn = random.Random(1)
    prompt = lambda tokens: [drawn.randrange(100, 40_000) for _ in range(tokens)]  # noqa: E731
    held = [prompt(args.context_tokens) for _ in range(max(BATCHES))]
    with engines(which, args.core) as running:
        values: dict[tuple[str, str], Values] = {name: {} for name in running}
        tokens: dict[tuple[str, str], list[list[int]]] = {}
        for one, _ in running.values():
            one.ask("hold", prompts=held)
        # The first round is not counted: it prepares kernels.
        for number in range(args.rounds + 1):
            for length in args.prompt_tokens:
                text = prompt(length)
                for name, (one, _) in running.items():
                    ms = one.ask("first", prompt=text)["ms"]
                    if number:
                        values[name].setdefault(f"first_token_{length}", []).append(ms)
            for batch in BATCHES:
                for name, (one, _) in running.items():
                    made = one.ask("decode", batch=batch, steps=args.steps)
                    tokens[name] = made["tokens"]
                    if number:
                        values[name].setdefault(f"step_{batch}", []).append(made["ms"])
        about = {}
        for name, (_, version) in running.items():
            same, of = agreeing(tokens[name], tokens["exact", name[1]])
            about[name] = {"version": version, "same_tokens": f"{same} of {of}"}
    return values, about


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=16, help="of decode, at each batch of a round")
    options.add_argument("--prompt-tokens", type=int, nargs="+", default=list(PROMPTS))
    options.add_argument("--context-tokens", type=int, default=CONTEXT_TOKENS, help="before a decode step")
    options.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options.add_argument("--core", type=int, default=(os.cpu_count() or 1) - 1, help="where engines run")
    args = parsed(options, rounds=1, steps=2, prompt_tokens=[64, 300], context_tokens=32)
    wanted = [(engine, dtype) for dtype in args.dtypes for engine in (*OURS, *PEERS)]
    missing = {engine: why for engine in PEERS if (why := absent(engine, os.environ))}
    values, about = measure(args, [each for each in wanted if each[0] not in missing])
    rows: list[dict[str, Any]] = [{"engine": engine, "absent": why} for engine, why in missing.items()]
    lines = [f"{row['engine']}: {row['absent']}" for row in rows]
    for dtype in args.dtypes:
        of_type = {engine: figures for (engine, each), figures in values.items() if each == dtype}
        ratios = against_best(of_type)
        for engine, figures in of_type.items():
            spreads = {f"{name}_ms": spread(each) for name, each in figures.items()}
            best = {"against_best": ratios[engine]} if engine in ratios else {}
            rows.append({"engine": engine, "dtype": dtype, **about[engine, dtype], **spreads, **best})
            lines += shown(rows[-1], ratios.get(engine, {}))
    sizes = {"rounds": args.rounds, "steps": args.steps, "context_tokens": args.context_tokens}
    finish(args, {**sizes, "rows": rows}, lines, also=COMPUTING)


def shown(row: Mapping[str, Any], ratios: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield f"{row['engine']} {row['dtype']} ({row['version']}; the same tokens: {row['same_tokens']})"
    for name, each in row.items():
        if name.endswith("_ms"):
            line = f"  {name:22} {each['p50']:9.1f} ({each['min']:.1f} to {each['max']:.1f})"
            if ratio := ratios.get(name.removesuffix("_ms")):
                spread_of = ratio["ratio"]
                line += f"  {spread_of['p50']:.2f} ({spread_of['min']:.2f} to {spread_of['max']:.2f})"
                line += f" times {ratio['peer']}"
            yield line


if __name__ == "__main__":
    main()
