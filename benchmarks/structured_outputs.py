"""Cost of a token of a structured answer against one without structure: the built-in model, exact numerics, one thread.

In each round one decode step of the batch takes place, and from its logits every row's next token is drawn four times:
greedy and sampled, with a grammar and without. The ratio is that of step and draw with the grammar over step and draw
without, by CPU time of the thread. What reading and compiling a grammar takes is measured once, cold.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from clusters import finish, parsed, parser, spread
from llguidance import LLTokenizer

from halfmoon.schemas.api.structures import Structure
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.frontend.grammars import GrammarReader
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.grammar_masks import GrammarMasks
from halfmoon.workers.model.loading.files import load_model
from halfmoon.workers.model.text.tokenizer import Tokenizer
from halfmoon.workers.sample_requests import params_of, request_of

MODEL = "smollm2-135m-instruct"
BLOCK_TOKENS = 256
_ROW = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "maxItems": 3},
    },
    "required": ["id", "name", "kind", "tags"],
    "additionalProperties": False,
}
_LARGE = {
    "type": "object",
    "properties": {f"field_{number}": _ROW if number % 5 else {"type": "string"} for number in range(60)},
    "additionalProperties": False,
}
STRUCTURES = {
    "any object": Structure(kind="json", asked={"type": "object"}, param="it"),
    "schema": Structure(kind="json", asked={"type": "array", "items": _ROW, "minItems": 50}, param="it"),
    "large schema": Structure(
        kind="json",
        asked={"type": "array", "items": _LARGE, "minItems": 50},
        param="it",
        any_whitespace=False,
    ),
    "regex": Structure(kind="regex", asked=r"([A-Z][a-z]{2,9} ){400}", param="it"),
    "grammar": Structure(kind="grammar", asked='start: "[" n ("," n)* "]"\nn: /[0-9]+/ | start', param="it"),
}


class Batch:
    """Sequences that begin with the same prompt and draw with seeds of their own."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, grammar: str, rows: int) -> None:
        self._engine = engine
        self._prompt = tokenizer.encode("Write some data about the planets.")
        self._tables = [engine.allocator.allocate(2) for _ in range(rows)]
        for table in self._tables:
            engine.prefill_chunk(self._prompt[:-1], 0, table)
        self._outputs: list[list[int]] = [[] for _ in range(rows)]
        self._samplings = [Sampling(grammar=grammar, seed=row) for row in range(rows)]

    def round(self) -> dict[str, float]:
        """ms of each part; the rows go on with what was sampled under the grammar."""
        engine, took = self._engine, {}
        last = [output[-1] if output else self._prompt[-1] for output in self._outputs]
        places = [len(self._prompt) - 1 + len(output) for output in self._outputs]
        started = time.thread_time()
        logits = engine.decode(last, places, self._tables)
        took["step"] = (time.thread_time() - started) * 1000
        for name, temperature, masked in (
            ("plain greedy", 0.0, False),
            ("grammar greedy", 0.0, True),
            ("plain sampled", 1.0, False),
            ("grammar sampled", 1.0, True),
        ):
            requests = []
            for row, (sampling, output) in enumerate(zip(self._samplings, self._outputs, strict=True)):
                asked = Sampling(
                    grammar=sampling.grammar if masked else "", seed=sampling.seed, temperature=temperature
                )
                params = params_of(asked)
                requests.append(request_of(engine, params, asked, self._prompt, output, name=f"{name} {row}"))
            started = time.thread_time()
            drawn = engine.sample_rows(logits, requests)
            took[name] = (time.thread_time() - started) * 1000
        for output, one in zip(self._outputs, drawn, strict=True):
            output.append(one.token_id)
        return took

    def close(self) -> None:
        for table in self._tables:
            self._engine.allocator.free(table)


def measured(engine: Engine, tokenizer: Tokenizer, name: str, rows: int, rounds: int) -> dict[str, Any]:
    started = time.perf_counter()
    grammar = asyncio.run(GrammarReader(tokenizer).read(STRUCTURES[name]))
    read_ms = (time.perf_counter() - started) * 1000
    started = time.perf_counter()
    engine.prepare_grammar(grammar)
    compiled_ms = (time.perf_counter() - started) * 1000
    batch = Batch(engine, tokenizer, grammar, rows)
    rounds_of = [batch.round() for _ in range(rounds + 2)][2:]  # the first ones prepare products and matchers
    batch.close()

    def ratio(way: str) -> dict[str, float]:
        return spread(
            [(one["step"] + one[f"grammar {way}"]) / (one["step"] + one[f"plain {way}"]) for one in rounds_of]
        )

    return {
        "structure": name,
        "rows": rows,
        "read_ms": round(read_ms, 1),
        "compile_ms": round(compiled_ms, 1),
        "ms": {part: round(statistics.median(one[part] for one in rounds_of), 3) for part in rounds_of[0]},
        "ratio_greedy": ratio("greedy"),
        "ratio_sampled": ratio("sampled"),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16], help="sequences")
    args = parsed(options, rounds=1, batches=[2])
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(MODEL)
    model = load_model(MODEL, dtype=torch.float32)

    def load() -> LLTokenizer:
        ends = sorted(tokenizer.eos_ids)
        return LLTokenizer(tokenizer.serialized(), n_vocab=model.config.vocab, eos_token=ends)

    engine = Engine(model, num_blocks=64, block_tokens=BLOCK_TOKENS, exact=True, masks=GrammarMasks(load))
    rows = [
        measured(engine, tokenizer, name, batch, args.rounds) for batch in args.batches for name in STRUCTURES
    ]
    lines = [
        f"{row['structure']:>12}, batch {row['rows']:2}: step {row['ms']['step']:.1f} ms, masks and draws {row['ms']}, "
        f"ratio greedy {row['ratio_greedy']['p50']:.3f} (to {row['ratio_greedy']['max']:.3f}), "
        f"sampled {row['ratio_sampled']['p50']:.3f}; read {row['read_ms']} ms, compiled {row['compile_ms']} ms"
        for row in rows
    ]
    finish(args, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
