"""`halfmoon frontend`: the client edge."""

from __future__ import annotations

import argparse
import asyncio
import socket
from pathlib import Path

from halfmoon.cli import model as models
from halfmoon.cli.metrics import shown
from halfmoon.cli.options import add_model, secret
from halfmoon.cli.output import say
from halfmoon.cli.processes.lifecycle import connect, until_stopped
from halfmoon.cli.processes.options import add_frontend, add_process
from halfmoon.cli.tracing import start_tracing, stop_tracing
from halfmoon.schemas.numbers import SECOND_NS


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--id", default=f"frontend-{socket.gethostname()}")
    add_frontend(parser)
    add_model(parser)
    add_process(parser)


async def run(args: argparse.Namespace) -> int:
    from halfmoon.workers.frontend.config import FrontendConfig
    from halfmoon.workers.frontend.frontend import Frontend
    from halfmoon.workers.model.tokenizer import Tokenizer

    layout = models.layout_of(args)
    tokenizer = Tokenizer.load(args.model)
    keys: dict[str, str] = {}
    if args.api_keys_file:
        text = await asyncio.to_thread(Path(args.api_keys_file).read_text)
        keys = {line.strip(): "" for line in text.splitlines() if line.strip()}
    tracing = start_tracing(args, "frontend", args.id)
    bus = await connect(args, args.id)
    config = FrontendConfig(
        frontend_id=args.id,
        model=layout.model,
        http_host=args.http_host,
        http_port=args.http_port,
        client_inboxes=tuple(args.client_inboxes.split(",")),
        api_keys=keys,
        cluster_secret=secret(args),
        context_tokens=models.context_tokens_max(args),
        open_requests_max=args.open_requests_max,
        drain_ns_max=int(args.drain_s * SECOND_NS),
    )
    frontend = Frontend(bus, config, tokenizer, layout)
    frontend.registry.tracing = tracing
    await frontend.start()
    say(f"frontend {args.id}: http://{args.http_host}:{frontend.http_port}")
    try:
        async with shown(args, frontend.registry.metrics.registry):
            await until_stopped(bus, args.health_file)
    finally:
        await frontend.stop()
        await bus.close()
        stop_tracing(tracing)
    return 0
