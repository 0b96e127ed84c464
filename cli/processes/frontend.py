"""`halfmoon frontend`: the client edge."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from halfmoon.cli import model as models
from halfmoon.cli.declared import add_options, options_of
from halfmoon.cli.metrics import shown
from halfmoon.cli.options import OptionInvalid, add_bus, add_config, check_option_file, secret
from halfmoon.cli.output import say
from halfmoon.cli.processes.lifecycle import connect, until_stopped
from halfmoon.cli.shared_options import ModelOptions, ProcessOptions
from halfmoon.cli.tracing import start_tracing, stop_tracing
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.workers.frontend.options import FrontendOptions, FrontendProcessOptions

if TYPE_CHECKING:
    import ssl

OPTIONS = (FrontendProcessOptions, ModelOptions, ProcessOptions)


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *OPTIONS)
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    from halfmoon.bus.edge.http_server import HttpLimits
    from halfmoon.workers.frontend.config import FrontendConfig
    from halfmoon.workers.frontend.frontend import Frontend
    from halfmoon.workers.frontend.tenants import read_keys
    from halfmoon.workers.model.loading.generation import sampling_defaults
    from halfmoon.workers.model.text.tokenizer import Tokenizer

    options = options_of(FrontendOptions, args)
    tokenizer = Tokenizer.load(args.model)  # before the weights are hashed: it may be refused
    layout = models.layout_of(args)
    if options.similar_tenants and layout.numerics == "exact":
        message = "not with exact numerics, in which no answer depends on other prompts"
        raise OptionInvalid(f"--similar-tenants: {message}")
    keys = {}
    if args.api_keys_file:
        try:
            keys = await asyncio.to_thread(read_keys, args.api_keys_file)
        except (OSError, ValueError) as problem:
            raise OptionInvalid(f"--api-keys-file: {problem}") from None
    tracing = start_tracing(args, "frontend", args.id)
    bus = await connect(args, args.id)
    names = args.served_model_name or [layout.model]
    config = FrontendConfig(
        **asdict(options),
        frontend_id=args.id,
        model=names[0],
        model_aliases=tuple(names[1:]),
        http_limits=HttpLimits(
            connections_max=options.http_connections_max,
            connections_per_address_max=options.http_connections_per_address_max,
            head_s=options.http_head_s,
            body_s=options.http_body_s,
        ),
        http_tls=_tls(args),
        ext_proc_tls=_tls_files(args) if options.ext_proc_port >= 0 else None,
        api_keys=keys,
        cluster_secret=secret(args),
        context_tokens=_context_tokens(args),
        sampling_defaults=sampling_defaults(args.model, args.generation_config),
        log_directory=args.log_dir,
        drain_ns_max=int(args.drain_s * SECOND_NS),
    )
    try:
        frontend = Frontend(bus, config, tokenizer, layout)
    except ImportError as lack:
        await bus.close()
        raise OptionInvalid(f"--ext-proc-port: {lack} (pip install 'halfmoon[gateway]')") from None
    frontend.registry.intake.tracing = tracing
    await frontend.start()
    gateways = f", for gateways port {frontend.ext_proc_port}" if frontend.ext_proc_port >= 0 else ""
    say(f"frontend {args.id}: {frontend.http_url}{gateways}")
    try:
        async with shown(args, frontend.registry.metrics.registry):
            await until_stopped(bus, args.health_file)
    finally:
        await frontend.stop()
        await bus.close()
        stop_tracing(tracing)
    return 0


def _context_tokens(args: argparse.Namespace) -> int:
    """Raises OptionInvalid."""
    most = models.context_tokens_max(args)
    if not args.max_model_len:
        return most
    if not 2 <= args.max_model_len <= most:
        raise OptionInvalid(f"--max-model-len: {args.max_model_len} is not in 2..{most}, the model's context")
    return int(args.max_model_len)


def _tls_files(args: argparse.Namespace) -> tuple[bytes, bytes] | None:
    """Key and certificates, which `_tls` has found good; None: plain."""
    if not args.ssl_certfile:
        return None
    chain = Path(args.ssl_certfile).read_bytes()
    return (Path(args.ssl_keyfile).read_bytes() if args.ssl_keyfile else chain), chain


def _tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises OptionInvalid."""
    import ssl

    if not args.ssl_certfile:
        if args.ssl_keyfile:
            raise OptionInvalid("--ssl-keyfile: needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for option, file in (("--ssl-certfile", args.ssl_certfile), ("--ssl-keyfile", args.ssl_keyfile)):
        if file:
            check_option_file(option, file)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as problem:
        raise OptionInvalid(f"--ssl-certfile {args.ssl_certfile}: {problem}") from None
    return context
