"""An engine as `cpu_engines.py` measures it: a process of its own with one thread, which computes what it is told.

Run by the interpreter that has the engine: `engine_ends.py ENGINE DTYPE MODEL`. ENGINE is `exact` or `fast` (ours),
`vllm`, `transformers` or `llama.cpp`; MODEL a Hugging Face directory, of llama.cpp a GGUF file, of ours a model's name.
One line of JSON in, one out:

    {"do": "hold", "prompts": [[...], ...]}    their KV is kept; decode begins behind it
    {"do": "first", "prompt": [...]}           ms to the first token of a prompt of which nothing is kept
    {"do": "decode", "batch": 8, "steps": 16}  ms a step of the first `batch` kept prompts, and the tokens of each

All tokens are the likeliest ones. Of another engine the bare loop is measured, as of ours: no HTTP, no text.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from itertools import count
from pathlib import Path
from typing import Any

#: Of one sequence, of a batch, and of what is kept and another prompt beside it.
TOKENS_MAX, BATCH_MAX, HELD_TOKENS_MAX = 2560, 8, 10_240

#: llama.cpp's numbers for a file's weights.
LLAMA_FTYPES = {"float32": 0, "bfloat16": 32}


class End(ABC):
    """Prompts and tokens are lists of numbers."""

    version: str

    @abstractmethod
    def hold(self, prompts: list[list[int]]) -> None: ...

    @abstractmethod
    def first(self, prompt: list[int]) -> int:
        """The first token behind `prompt`."""

    @abstractmethod
    def decode(self, batch: int, steps: int) -> tuple[float, list[list[int]]]:
        """Seconds a step; of each sequence the first token and those of the steps."""


class Ours(End):
    BLOCK_TOKENS, CHUNK_TOKENS = 256, 1024

    def __init__(self, model: str, dtype: str, *, exact: bool) -> None:
        import torch

        from halfmoon.workers.model import self_test
        from halfmoon.workers.model.engine import Engine
        from halfmoon.workers.model.loading.files import load_model

        torch.set_num_threads(1)
        blocks = HELD_TOKENS_MAX // self.BLOCK_TOKENS
        loaded = load_model(model, dtype=getattr(torch, dtype))
        self._engine = Engine(loaded, num_blocks=blocks, block_tokens=self.BLOCK_TOKENS, exact=exact)
        # An older checkout, beside which this one is measured, pads all products of exact numerics to one number of
        # rows.
        if hasattr(self_test, "trial_of"):
            self_test.trial_of(self._engine)
        self.version = f"torch {torch.__version__}"
        self._held: list[tuple[int, list[int], int]] = []

    def _prefill(self, prompt: list[int], table: list[int]) -> int:
        from halfmoon.workers.model.prompt_rows import PromptRows

        # In exact numerics an older checkout's engine takes one block at a time.
        whole = hasattr(PromptRows, "pieces") or not self._engine.exact
        size = self.CHUNK_TOKENS if whole else self.BLOCK_TOKENS
        for at in range(0, len(prompt), size):
            part = prompt[at : at + size]
            logits = self._engine.prefill_chunk(part, at, table, want_logits=at + size >= len(prompt))
        assert logits is not None
        return int(logits.argmax())

    def hold(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            table = self._engine.allocator.allocate(len(prompt) // self.BLOCK_TOKENS + 1)
            self._held.append((len(prompt), table, self._prefill(prompt, table)))

    def first(self, prompt: list[int]) -> int:
        table = self._engine.allocator.allocate(-(-len(prompt) // self.BLOCK_TOKENS))
        token = self._prefill(prompt, table)
        self._engine.allocator.free(table)
        return token

    def decode(self, batch: int, steps: int) -> tuple[float, list[list[int]]]:
        held = self._held[:batch]
        positions, tables = [tokens for tokens, _, _ in held], [table for _, table, _ in held]
        drawn = [[first for _, _, first in held]]
        began = time.perf_counter()
        for _ in range(steps):
            drawn.append(self._engine.decode(drawn[-1], positions, tables).argmax(-1).tolist())
            positions = [position + 1 for position in positions]
        return (time.perf_counter() - began) / steps, [list(each) for each in zip(*drawn, strict=True)]


class Vllm(End):
    def __init__(self, model: str, dtype: str) -> None:
        import vllm

        eager = bool(os.environ.get("HALFMOON_VLLM_EAGER"))
        self.version = f"vLLM {vllm.__version__}{', eager' * eager}"
        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=model,
            dtype=dtype,
            max_model_len=TOKENS_MAX,
            max_num_seqs=BATCH_MAX,
            enforce_eager=eager,
        ).llm_engine
        self._numbers = count()
        self._held: list[list[int]] = []

    def _ask(self, prompt: list[int], tokens: int) -> str:
        name = f"{next(self._numbers)}"
        params = self._params(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _step(self) -> dict[str, list[int]]:
        return {each.request_id: list(each.outputs[0].token_ids) for each in self._engine.step()}

    def hold(self, prompts: list[list[int]]) -> None:
        """vLLM's own prefix cache keeps them."""
        self._held = prompts
        for prompt in prompts:
            self.first(prompt)

    def first(self, prompt: list[int]) -> int:
        name, found = self._ask(prompt, 1), dict[str, list[int]]()
        while self._engine.has_unfinished_requests():
            found |= self._step()
        return found[name][0]

    def decode(self, batch: int, steps: int) -> tuple[float, list[list[int]]]:
        names = [self._ask(prompt, steps + 1) for prompt in self._held[:batch]]
        found: dict[str, list[int]] = {name: [] for name in names}
        # From the step after which all have a token to the one after which one has all of its own: in each of these
        # the batch is whole.
        begun = ended = (0.0, 0)
        while self._engine.has_unfinished_requests():
            found |= self._step()
            now = (time.perf_counter(), min(map(len, found.values())))
            if now[1] and not begun[1]:
                begun = now
            if not ended[1] and max(map(len, found.values())) == steps + 1:
                ended = now
        return (ended[0] - begun[0]) / (ended[1] - begun[1]), [found[name] for name in names]


class Transformers(End):
    def __init__(self, model: str, dtype: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model, self._torch = loaded.eval(), torch
        self._held: dict[int, tuple[Any, list[int]]] = {}

    def _forward(self, rows: list[list[int]], cache: Any = None) -> tuple[Any, list[int]]:
        """The cache, and the likeliest token behind each row."""
        ids = self._torch.tensor(rows)
        made = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return made.past_key_values, made.logits[:, -1].argmax(-1).tolist()

    def hold(self, prompts: list[list[int]]) -> None:
        for batch in {1, len(prompts)}:
            self._held[batch] = self._forward(prompts[:batch])

    def first(self, prompt: list[int]) -> int:
        return self._forward([prompt])[1][0]

    def decode(self, batch: int, steps: int) -> tuple[float, list[list[int]]]:
        cache, first = self._held[batch]
        drawn = [first]
        began = time.perf_counter()
        for _ in range(steps):
            drawn.append(self._forward([[token] for token in drawn[-1]], cache)[1])
        took_s = time.perf_counter() - began
        cache.crop(-steps)
        return took_s / steps, [list(each) for each in zip(*drawn, strict=True)]


class LlamaCpp(End):
    """By llama.cpp's own functions. KV is f16, as by default there."""

    def __init__(self, model: str, dtype: str) -> None:
        import llama_cpp
        import numpy as np

        self._numpy, self._lib = np, llama_cpp
        self.version = f"llama.cpp of llama-cpp-python {llama_cpp.__version__}"
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        self._quiet = quiet
        llama_cpp.llama_log_set(quiet, None)
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.gguf").encode()
            wanted = llama_cpp.llama_model_quantize_default_params()
            wanted.ftype, wanted.allow_requantize, wanted.nthread = LLAMA_FTYPES[dtype], True, 1
            if llama_cpp.llama_model_quantize(model.encode(), path, ctypes.byref(wanted)):
                raise SystemExit(f"llama.cpp makes no {dtype} of {model}")
            options = llama_cpp.llama_model_default_params()
            options.use_mmap = False
            self._model = llama_cpp.llama_model_load_from_file(path, options)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_seq_max = (BATCH_MAX + 1) * TOKENS_MAX, BATCH_MAX + 1
        context.n_threads = context.n_threads_batch = 1
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(context.n_batch, 0, 1)
        self._held: list[tuple[int, int]] = []

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """`rows`: token, position, sequence, and whether the token behind it is wanted. Returns those."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._lib.llama_decode(self._context, batch):
            raise SystemExit("llama_decode failed")
        found = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = self._lib.llama_get_logits_ith(self._context, i)
                found.append(int(self._numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax()))
        return found

    def _prefill(self, prompt: list[int], sequence: int) -> int:
        last = len(prompt) - 1
        return self._run([(token, at, sequence, at == last) for at, token in enumerate(prompt)])[0]

    def hold(self, prompts: list[list[int]]) -> None:
        self._held = [(len(each), self._prefill(each, number)) for number, each in enumerate(prompts)]

    def first(self, prompt: list[int]) -> int:
        token = self._prefill(prompt, BATCH_MAX)
        self._lib.llama_memory_seq_rm(self._memory, BATCH_MAX, 0, -1)
        return token

    def decode(self, batch: int, steps: int) -> tuple[float, list[list[int]]]:
        held = self._held[:batch]
        drawn = [[first for _, first in held]]
        began = time.perf_counter()
        for step in range(steps):
            tokens = zip(drawn[-1], held, strict=True)
            drawn.append(
                self._run(
                    [(token, at + step, number, True) for number, (token, (at, _)) in enumerate(tokens)]
                )
            )
        took_s = time.perf_counter() - began
        for number, (at, _) in enumerate(held):
            self._lib.llama_memory_seq_rm(self._memory, number, at, -1)
        return took_s / steps, [list(each) for each in zip(*drawn, strict=True)]


def made(engine: str, dtype: str, model: str) -> End:
    match engine:
        case "exact" | "fast":
            return Ours(model, dtype, exact=engine == "exact")
        case "vllm":
            return Vllm(model, dtype)
        case "transformers":
            return Transformers(model, dtype)
        case "llama.cpp":
            return LlamaCpp(model, dtype)
    raise SystemExit(f"no engine {engine}")


def main() -> None:
    engine, dtype, model = sys.argv[1:]
    # Libraries write to standard output; what we say must stay apart from it.
    say = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    end = made(engine, dtype, model)
    print(json.dumps({"version": end.version}), file=say)
    for line in sys.stdin:
        told = json.loads(line)
        answer: dict[str, Any] = {}
        match told["do"]:
            case "hold":
                end.hold(told["prompts"])
            case "first":
                began = time.perf_counter()
                answer["token"] = end.first(told["prompt"])
                answer["ms"] = (time.perf_counter() - began) * 1000
            case "decode":
                step_s, answer["tokens"] = end.decode(told["batch"], told["steps"])
                answer["ms"] = step_s * 1000
        print(json.dumps(answer), file=say)


if __name__ == "__main__":
    main()
