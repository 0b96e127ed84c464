"""A workload with near-copies on a real cluster, with and without KV of similar prompts (`kv.similar`), by turns.

The built-in model, f32, fast numerics, two prefill workers, one decode worker. One request at a time goes to the same
worker each time; with `--policy random` to either, and the log tells of which near-copies the reference was on the
other's node. Every prompt asks for a summary of an article made of sentences of this repository's documents and
docstrings. A third of the prompts are near-copies: articles of which a tenth of the sentences is another; the other
articles have no sentence in common. Each prompt is sent twice, one after the other, once with `kv.similar`; salts keep
the two apart, so that none finds the other's blocks. Time to the first token, as the client sees it; of near-copies
whether it is the same token, and how far its log probability is off; of articles what being compared costs those that
nothing is like.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from clusters import cluster, finish, parsed, parser, python_in, spread
from similar import replaced, sentences_of

from halfmoon.workers.model.text.tokenizer import Tokenizer

MODEL = "smollm2-135m-instruct"
ROOT = Path(__file__).parents[1]
FLAGS = ("--prefill", "2", "--decode", "1", "--numerics", "fast", "--dtype", "float32", "--pool-mib", "2048")
FOLDERS = ("bus", "cli", "conductor", "schemas", "store", "workers", "tests", "benchmarks")
#: That stand in near-copies for those of their article.
OTHER_SENTENCES = 200
ASK = "Summarise the following text in two sentences.\n\n"


Prompt = tuple[str, list[int]]


def workload(prompts: int, tokens: int) -> list[list[Prompt]]:
    """Groups of ("article" or "near-copy", token ids): a near-copy is two prompts behind what it is like."""
    draw, tokenizer = random.Random(1), Tokenizer.load(MODEL)
    paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
    pool = list(dict.fromkeys([*(one for path in paths for one in sentences_of(path)), *docstrings()]))
    draw.shuffle(pool)
    # Of the same kind and length as those that they replace.
    others = [pool.pop() for _ in range(OTHER_SENTENCES)]

    def article() -> list[str]:
        sentences: list[str] = []
        while len(tokenizer.encode(" ".join(sentences))) < tokens:
            if not pool:
                raise SystemExit(f"--prompts {prompts}: the repository has too few sentences")
            sentences.append(pool.pop())
        return sentences

    def prompt(kind: str, sentences: list[str]) -> Prompt:
        return kind, tokenizer.encode(ASK + " ".join(sentences))

    groups: list[list[Prompt]] = []
    for _ in range(prompts // 3):
        first, other = article(), article()
        copy = replaced(0.1)(first, others, draw)
        groups.append([prompt("article", first), prompt("article", other), prompt("near-copy", copy)])
    return groups + [[prompt("article", article())] for _ in range(prompts % 3)]


def docstrings() -> list[str]:
    """Sentences of the repository's own."""
    found: list[str] = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = " ".join((ast.get_docstring(node) or "").split())
                    found += [one for one in re.split(r"(?<=[.:;])\s+", text) if len(one) > 20]
    return found


def ask(http: str, ids: list[int], *, similar: bool) -> tuple[float, int, float, dict[str, Any]]:
    """Seconds to the first token, the token, its log probability, and what the usage says of the prompt, with the
    request's id.
    """
    body: dict[str, Any] = {
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0,
        "return_token_ids": True,
        "logprobs": 0,
    }
    body |= {"kv": {"similar": True}, "cache_salt": "on"} if similar else {"cache_salt": "off"}
    request = urllib.request.Request(
        f"{http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)
    took = time.perf_counter() - begin
    (choice,) = found["choices"]
    logprob = choice["logprobs"]["token_logprobs"][0]
    details = {**found["usage"]["prompt_tokens_details"], "request_id": found["id"].removeprefix("cmpl-")}
    return took, choice["token_ids"][0], logprob, details


def measured(http: str, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """A row of each prompt."""
    rows = []
    for warm in range(4):
        ask(http, prompts[0][1][warm + 1 : 600], similar=False)
    for number, (kind, ids) in enumerate(prompts):
        found = {way: ask(http, ids, similar=way) for way in ((False, True) if number % 2 else (True, False))}
        (off_s, off, off_logprob, _), (on_s, on, on_logprob, details) = found[False], found[True]
        rows.append(
            {
                "kind": kind,
                "tokens": len(ids),
                "off_s": round(off_s, 4),
                "on_s": round(on_s, 4),
                "same": off == on,
                "logprob_off_by": round(abs(off_logprob - on_logprob), 4) if off == on else None,
                "stood_in": details["similar_tokens"],
                "computed": details["similar_computed_tokens"],
                "request_id": details["request_id"],
            }
        )
    return rows


def references(directory: Path) -> dict[str, bool]:
    """By request whether its reference was on another node than its worker's, as the cluster's log says."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        subprocess.run(
            [
                python_in(ROOT),
                "-m",
                "halfmoon.cli.main",
                "events",
                "save",
                str(log),
                "--cluster",
                directory.name,
            ],
            env={**os.environ, "XDG_STATE_HOME": str(directory.parents[1])},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        for line in log.read_text().splitlines():
            decision = json.loads(line).get("decision", {})
            reference = decision.get("reference")
            if reference:
                # A worker of `halfmoon up` has the name of its node.
                found[decision["request_id"]] = reference["node_id"] != decision["worker_id"]
    return found


def summary(some: list[dict[str, Any]]) -> dict[str, Any]:
    hits = [row for row in some if row["stood_in"]]
    ratios = [row["on_s"] / row["off_s"] for row in some]
    off_by = [row["logprob_off_by"] for row in some if row["logprob_off_by"] is not None]
    return {
        "prompts": len(some),
        "hits": len(hits),
        "off_s": spread([row["off_s"] for row in some]),
        "on_s": spread([row["on_s"] for row in some]),
        "on_over_off": spread(ratios),
        "on_over_off_mean": round(statistics.fmean(ratios), 4),
        "same_token": round(sum(row["same"] for row in some) / len(some), 3),
        "logprob_off_by": spread(off_by or [0.0]),
        "computed": round(
            statistics.fmean([row["computed"] / row["tokens"] for row in hits]) if hits else 1.0, 3
        ),
    }


def main() -> None:
    words = parser(__doc__ or "")
    words.add_argument("--prompts", type=int, default=36)
    words.add_argument("--tokens", type=int, default=1_000, help="of an article (1,000)")
    words.add_argument(
        "--block-tokens", type=int, default=256, help="of a block; a reference is whole ones (256)"
    )
    words.add_argument("--policy", default="halfmoon", help="the conductor's (halfmoon)")
    options = parsed(words, prompts=3, tokens=800)
    prompts = [one for group in workload(options.prompts, options.tokens) for one in group]
    flags = ("--block-tokens", str(options.block_tokens), "--policy", options.policy)
    with cluster(*FLAGS, *flags) as addresses:
        rows = measured(addresses["http"], prompts)
        where = references(Path(addresses["directory"]))
    for row in rows:
        request_id = row.pop("request_id")
        if row["stood_in"] and request_id not in where:
            raise SystemExit(f"the log has no reference for {request_id}, whose answer counts tokens of one")
        row["elsewhere"] = where.get(request_id, False)
    result: dict[str, Any] = {
        "prompts": options.prompts,
        "tokens": options.tokens,
        "block_tokens": options.block_tokens,
        "policy": options.policy,
    }
    lines = []
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("article", "near-copy")}
    elsewhere = [row for row in kinds["near-copy"] if row["elsewhere"]]
    if elsewhere:
        kinds["near-copy, reference on another node"] = elsewhere
    for kind, some in kinds.items():
        one = result[kind] = summary(some)
        ratio = one["on_over_off"]
        hits, on_s, off_s = one["hits"], one["on_s"]["p50"], one["off_s"]["p50"]
        lines.append(
            f"{kind}: {one['prompts']} prompts, {hits} with a reference; first token {on_s:.3f} s with kv.similar, "
            f"{off_s:.3f} s without: {ratio['p50']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}, mean "
            f"{one['on_over_off_mean']:.3f}); the same token in {one['same_token']:.0%}, its log probability off by "
            f"{one['logprob_off_by']['p50']:.3f} nats; {one['computed']:.1%} computed"
        )
    result["rows"] = rows
    finish(options, result, lines)


if __name__ == "__main__":
    main()
