"""`halfmoon adapt vllm` and `adapt sglang`: an engine of another's as a worker of the cluster, unmodified."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from halfmoon.bus.telemetry.metrics import process_registry
from halfmoon.cli import model as models
from halfmoon.cli.declared import add_options, options_of
from halfmoon.cli.metrics import shown
from halfmoon.cli.options import OptionInvalid, add_bus, add_config, read_option_file
from halfmoon.cli.output import say
from halfmoon.cli.processes.lifecycle import connect, say_takes_orders, stop_signal, until_stopped
from halfmoon.cli.shared_options import ModelOptions, ProcessOptions
from halfmoon.cli.tracing import start_tracing, stop_tracing
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.policy import Layout
from halfmoon.workers.adapters.options import (
    BATCH_MAX,
    ENGINE_TITLES,
    EVENTS_PORT,
    TOKEN_BUDGET,
    AdapterOptions,
)
from halfmoon.workers.model.loading.files import ModelConfig, load_config

if TYPE_CHECKING:
    from halfmoon.workers.adapters.engines.api import EngineApi, EngineFacts
    from halfmoon.workers.adapters.mirror import EngineMirror

LOOK_S = 0.5
#: For the word that it leaves.
FLUSH_S = 2.0
#: Of letters, spaces, digits and signs in runs, tokenizers make different tokens.
SAMPLE = "The moon's 384,400 km away;  naïve façade — def f(x): return x**2\n\n\t漢字 🙂"

OPTIONS = (AdapterOptions, ModelOptions, ProcessOptions)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=tuple(ENGINE_TITLES), help="whose API the engine has")
    add_options(parser, *OPTIONS)
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    from halfmoon.workers.adapters.engines.kinds import ENGINE_APIS

    options_of(AdapterOptions, args)
    kind = ENGINE_APIS[args.kind]
    layout, config = _layout(args), load_config(args.model)
    key = read_option_file("--engine-key-file", args.engine_key_file).strip() if args.engine_key_file else ""
    api = kind(args.url, key=key, reached_at=args.engine_reached_at)
    try:
        await api.open()
    except ValueError as problem:
        raise OptionInvalid(f"--url: {problem}") from None
    stop = stop_signal()
    first = True
    try:
        while await _answers(args, api, stop, first=first):
            await _serve(args, api, layout, config, stop)
            first = False
    finally:
        await api.close()
    return 0


def _layout(args: argparse.Namespace) -> Layout:
    """Block keys are counted by its blocks; how an engine computes is its own business."""
    layout = models.layout_of(args)
    if layout.layers == 0:
        raise OptionInvalid("--engine null: an adapted engine computes; leave it out")
    return msgspec.structs.replace(layout, numerics="fast", segment_tokens=0)


async def _answers(args: argparse.Namespace, api: EngineApi, stop: asyncio.Event, *, first: bool) -> bool:
    """Returns when the engine answers; False: the adapter was stopped first. Raises OptionInvalid: it never did."""
    from halfmoon.workers.adapters.engines.api import EngineAway

    until, said = time.monotonic() + args.engine_wait_s, False
    while not stop.is_set():
        try:
            await api.healthy()
            return True
        except EngineAway as problem:
            if first and time.monotonic() > until:
                raise OptionInvalid(
                    f"--url {problem}; no answer in {args.engine_wait_s:.0f} s (--engine-wait-s)"
                ) from None
            if not said:
                said = True
                say(f"adapter {args.id}: waits for the engine: {problem}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
    return False


async def _serve(
    args: argparse.Namespace, api: EngineApi, layout: Layout, config: ModelConfig, stop: asyncio.Event
) -> None:
    """One life of the engine. Raises OptionInvalid: it cannot be adapted."""
    from halfmoon.workers.adapters.engines.api import EngineAway, EngineUnfit
    from halfmoon.workers.adapters.mirror import EngineMirror
    from halfmoon.workers.adapters.probe import Probe

    mirror = None
    try:
        facts = await api.facts(args.engine_model)
        await _same_model(args, api, facts, config)
        _fits(args, facts, layout)
        events = args.events or facts.events or f"tcp://{api.host}:{EVENTS_PORT}"
        mirror = EngineMirror(
            block_tokens=layout.block_tokens,
            cache_tokens=facts.cache_tokens,
            cache_blocks=facts.blocks_kept or facts.cache_blocks,
            events=events if facts.caches else "",
            replay=args.events_replay or facts.replay,
            topic=args.events_topic or facts.topic,
        )
        try:
            mirror.start()
        except ValueError as problem:
            raise OptionInvalid(f"--events {problem}") from None
        probe = Probe(api, facts, block_tokens=layout.block_tokens, vocabulary=config.vocab)
        profile = await probe.run(mirror)
        say(
            f"adapter {args.id}: {args.url} serves {facts.model}, {facts.cache_blocks} blocks of {facts.block_tokens} "
            f"tokens; there {_costs(facts, profile)}"
        )
        await _work(args, api, mirror, facts, layout, config, profile, stop)
    except EngineUnfit as problem:
        raise OptionInvalid(str(problem)) from None
    except EngineAway as problem:
        say(f"adapter {args.id}: {problem}")
    finally:
        if mirror is not None:
            await mirror.stop()


async def _work(
    args: argparse.Namespace,
    api: EngineApi,
    mirror: EngineMirror,
    facts: EngineFacts,
    layout: Layout,
    config: ModelConfig,
    profile: CostProfile,
    stop: asyncio.Event,
) -> None:
    from halfmoon.workers.adapters.engine_link import EngineLink
    from halfmoon.workers.adapters.metrics import AdapterMetrics
    from halfmoon.workers.adapters.worker import AdapterWorker
    from halfmoon.workers.worker import WorkerConfig

    tracing = start_tracing(args, args.role, args.id)
    bus = await connect(args, args.id)
    engine = EngineLink(api, api.words_of(facts), mirror, config.vocab)
    token_budget = args.engine_token_budget or facts.token_budget or TOKEN_BUDGET
    worker = AdapterWorker(
        bus,
        engine,
        WorkerConfig(
            worker_id=args.id,
            node_id=args.id,
            layout=layout,
            profile=profile,
            kv_blocks=facts.cache_tokens // layout.block_tokens,
            context_tokens_max=facts.context_tokens,
            batch_max=args.engine_batch_max or facts.batch_max or BATCH_MAX,
            token_budget=token_budget if args.role == "mixed" else 0,
        ),
        frozenset(config.eos_token_ids),
        args.role,
    )
    worker.tracing = tracing
    await worker.start()
    await say_takes_orders(bus, f"adapter {args.id}")
    registry = process_registry(bus, role=args.role, process_id=args.id, node_id=args.id)
    registry.register(worker.metrics)
    registry.register(AdapterMetrics(mirror, worker.state))
    try:
        async with shown(args, registry):
            await until_stopped(bus, args.health_file, worker.failed, stop=stop, over=engine.lost)
    finally:
        lost = engine.why_lost()
        if lost:
            say(f"adapter {args.id}: {lost}")
        await worker.stop(drain_s=0.0 if lost else args.drain_s)
        await bus.flush(FLUSH_S)
        await bus.close()
        stop_tracing(tracing)


async def _same_model(
    args: argparse.Namespace, api: EngineApi, facts: EngineFacts, config: ModelConfig
) -> None:
    """Raises EngineUnfit where the engine's tokens are not the model's."""
    from halfmoon.workers.adapters.engines.api import EngineUnfit

    try:
        from halfmoon.workers.model.text.tokenizer import Tokenizer

        ours = Tokenizer.load(args.model).encode(SAMPLE)
    except ModuleNotFoundError:  # a light environment: the frontends have it
        return
    theirs = await api.tokens_of(facts.model, SAMPLE)
    if theirs is not None and list(ours) != theirs:
        raise EngineUnfit(
            f"--model {args.model}: {args.url} serves a model with other tokens ({facts.model})"
        )


def _fits(args: argparse.Namespace, facts: EngineFacts, layout: Layout) -> None:
    from halfmoon.workers.adapters.engines.api import EngineUnfit

    if facts.role and facts.role != args.role:
        raise EngineUnfit(f"--role {args.role}: {args.url} was started for the role {facts.role}")
    if layout.block_tokens % facts.block_tokens:
        raise EngineUnfit(
            f"--block-tokens {layout.block_tokens}: no multiple of the engine's blocks of {facts.block_tokens} tokens"
        )
    if facts.cache_tokens < layout.block_tokens:
        raise EngineUnfit(
            f"--url {args.url}: its cache of {facts.cache_tokens} tokens holds no block of {layout.block_tokens}"
        )


def _costs(facts: EngineFacts, profile: CostProfile) -> str:
    """As far as the engine could tell them."""
    prompt = f"a token of a prompt takes {profile.prefill_per_token_ps / 1e6:.0f} µs"
    step = f"a step takes {profile.step_ns(1, 0) / 1e6:.1f} ms"
    return {"prefill": prompt, "decode": step}.get(facts.role or "", f"{prompt}, {step}")
