"""From model options to the layout that all processes share, and to an engine; only that imports torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from halfmoon.cli.declared import options_of
from halfmoon.cli.options import OptionInvalid, read_option_file
from halfmoon.cli.shared_options import ModelOptions
from halfmoon.schemas.codec import one_line
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import ExactNumerics
from halfmoon.workers.kept_profile import ProfileCheck, doubt
from halfmoon.workers.model.loading.files import ModelConfig, load_config, model_fingerprint
from halfmoon.workers.model.segments import segment_tokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from halfmoon.workers.model.grammar_masks import GrammarMasks

NULL_CONTEXT_TOKENS = 131_072


def check_texts(model: str) -> None:
    """Reads the model's config, tokenizer and chat template (below a second): they are to be refused before weights are
    read and hashed, or anything is started. Raises ModelError.
    """
    from halfmoon.workers.model.text.tokenizer import Tokenizer

    Tokenizer.load(model)


def layout_of(args: argparse.Namespace) -> Layout:
    """The KV layout by the model's configuration (cheap: weights stay on disk)."""
    if args.layout_file:
        try:
            return msgspec.json.decode(read_option_file("--layout-file", args.layout_file), type=Layout)
        except (msgspec.DecodeError, RecursionError) as problem:
            raise OptionInvalid(f"--layout-file {args.layout_file}: {one_line(problem)}") from None
    options_of(ModelOptions, args)
    config = load_config(args.model)
    name = Path(args.model).stem if "/" in args.model or args.model.endswith(".gguf") else args.model
    if args.engine == "null":
        return Layout(
            model=name,
            model_fingerprint="null",
            layers=0,
            kv_heads=0,
            head_dim=0,
            block_tokens=args.block_tokens,
            dtype="none",
        )
    cuda = device_of(args) != "cpu"
    exact = not cuda if args.numerics == "auto" else args.numerics == "exact"
    return Layout(
        model=name,
        model_fingerprint=model_fingerprint(args.model),
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_tokens=args.block_tokens,
        dtype=("bfloat16" if cuda else "float32") if args.dtype == "auto" else args.dtype,
        numerics="exact" if exact else "fast",
        segment_tokens=segment_tokens(args.block_tokens) if exact else 0,
    )


def device_of(args: argparse.Namespace) -> str:
    """The device's name; asks torch only where it has to."""
    if args.device != "auto":
        return str(args.device)
    if not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def context_tokens_max(args: argparse.Namespace) -> int:
    return NULL_CONTEXT_TOKENS if args.engine == "null" else load_config(args.model).context_tokens_max


def build_engine(
    args: argparse.Namespace, layout: Layout, *, kv_blocks: int, cache_elsewhere: bool = False
) -> Any:
    """The engine, with its weights loaded and warm."""
    if layout.layers == 0:
        from halfmoon.workers.model.null_engine import NullEngine

        config = replace(load_config(args.model), context_tokens_max=NULL_CONTEXT_TOKENS)
        masks = _masks(args.model, config.vocab)
        return NullEngine(config, num_blocks=kv_blocks, block_tokens=layout.block_tokens, masks=masks)
    import torch

    from halfmoon.workers.model.engine import Engine
    from halfmoon.workers.model.loading.files import load_model
    from halfmoon.workers.model.preloaded import preloaded

    _set_threads(args)
    device = _usable_device(args)
    dtype = getattr(torch, layout.dtype)
    known = None
    if device == "cpu":
        known = preloaded(layout.model_fingerprint, dtype, query_first=cache_elsewhere)
        if known is None:
            _check_memory(args.model, dtype.itemsize)
    model, transformer = known or (load_model(args.model, dtype=dtype, device=device), None)
    try:
        return Engine(
            model,
            num_blocks=kv_blocks,
            block_tokens=layout.block_tokens,
            exact=layout.numerics == "exact",
            attention=args.attention_kernel,
            segment_tokens=layout.segment_tokens,
            query_first=cache_elsewhere,
            masks=_masks(args.model, model.config.vocab),
            transformer=transformer,
        )
    except (RuntimeError, MemoryError) as problem:
        raise _no_memory(problem, layout, kv_blocks) from None


def preload_model(model: str, layout: Layout, query_first: Iterable[bool]) -> None:
    """For workers that are forked from this process: their `build_engine` finds the weights packed, for one thread."""
    import torch

    from halfmoon.workers.model.loading.files import load_model
    from halfmoon.workers.model.preloaded import preload

    torch.set_num_threads(1)
    dtype = getattr(torch, layout.dtype)
    _check_memory(model, dtype.itemsize)
    preload(load_model(model, dtype=dtype), query_first)


def _masks(model: str, vocab: int) -> GrammarMasks:
    """Masks of `vocab` tokens; the model's tokenizer is read with the first grammar."""
    from halfmoon.workers.model.grammar_masks import GrammarMasks

    def load() -> LLTokenizer:
        from llguidance import LLTokenizer

        from halfmoon.workers.model.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(model)
        return LLTokenizer(tokenizer.serialized(), n_vocab=vocab, eos_token=sorted(tokenizer.eos_ids))

    return GrammarMasks(load)


def build_attention(args: argparse.Namespace, layout: Layout, *, kv_blocks: int, kv_heads: int) -> Any:
    """A cache of `kv_heads` KV heads and the attention operator: no weights are read."""
    import torch

    from halfmoon.workers.model.attention.engine import AttentionEngine

    _set_threads(args)
    try:
        return AttentionEngine(
            load_config(args.model),
            kv_heads=kv_heads,
            num_blocks=kv_blocks,
            block_tokens=layout.block_tokens,
            segment_tokens=layout.segment_tokens,
            dtype=getattr(torch, layout.dtype),
            device=_usable_device(args),
            attention=args.attention_kernel,
        )
    except (RuntimeError, MemoryError) as problem:
        raise _no_memory(problem, layout, kv_blocks) from None


def _set_threads(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)


def _no_memory(problem: Exception, layout: Layout, kv_blocks: int) -> Exception:
    """The error of a cache that does not fit into memory; the problem itself where it is another."""
    if "memory" not in str(problem):  # torch has no type of its own for it on CPUs
        return problem
    size = kv_blocks * layout.block_bytes >> 20
    return OptionInvalid(f"--kv-blocks {kv_blocks}: a cache of {size} MiB does not fit in memory")


def _usable_device(args: argparse.Namespace) -> str:
    """The device's name, after a first use of it. Raises OptionInvalid."""
    import torch

    name = device_of(args)
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as problem:
        raise OptionInvalid(f"--device {name}: {str(problem).splitlines()[0][:200]}") from None
    return name


def _check_memory(model: str, element_bytes: int) -> None:
    """Raises OptionInvalid for weights that this machine cannot hold, before hours go into reading them."""
    from halfmoon.workers.model.loading.weight_table import weight_elements

    needed = weight_elements(load_config(model)) * element_bytes
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        sizes = f"{needed >> 20} MiB of weights; this machine has {there >> 20} MiB of memory"
        raise OptionInvalid(f"--model {model}: {sizes}")


def measure_profile(engine: Any, layout: Layout) -> CostProfile:
    """The cost of work on this machine; from the cache of earlier measurements where there is one."""
    if layout.layers == 0:
        return CostProfile()
    from halfmoon.workers.profiler import measured_profile

    return measured_profile(engine)


def profile_check(
    engine: Any, profile: CostProfile, say: Callable[[str], None], *, steps: bool
) -> ProfileCheck:
    """Doubts the kept profile for the next start when the worker's measured times differ. `steps`: it makes steps
    itself.
    """
    from halfmoon.workers.profiler import profile_key

    def doubted(why: str) -> None:
        say(why)
        doubt(profile_key(engine))

    return ProfileCheck(profile, doubted, steps=steps)


def measure_attention(engine: Any) -> CostProfile:
    """The cost of attention alone on an attention worker's engine, kept as a profile is; nothing on other devices."""
    if engine.cache.device.type != "cpu":
        return CostProfile()
    from halfmoon.workers.profiler import attention_profile

    return attention_profile(engine)


def prepare_numerics(engine: Any, layout: Layout) -> tuple[ExactNumerics, str]:
    """Finds out how many rows an engine's products should have here. Returns whether exact numerics hold on this CPU,
    and one line that names the differing ways; ("", "") where none are claimed, or the cache is too small to try.
    """
    if layout.layers == 0:
        return "", ""
    from halfmoon.workers.model.self_test import prepare_products
    from halfmoon.workers.profiler import profile_key

    differing = prepare_products(engine, profile_key(engine))
    if differing is None or layout.numerics != "exact":
        return "", ""
    if not differing:
        return "held", ""
    return "not_held", (
        f"warning: {' and '.join(differing)} gave other bits than a request alone and cold: "
        f"--numerics exact is not to be trusted on this CPU"
    )


__all__ = [
    "ModelConfig",
    "build_attention",
    "build_engine",
    "check_texts",
    "context_tokens_max",
    "device_of",
    "layout_of",
    "measure_attention",
    "measure_profile",
    "prepare_numerics",
    "profile_check",
]
