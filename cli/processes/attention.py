"""Options of attention that runs apart from the model: attention workers, decode workers without KV, and lending."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

from halfmoon.cli.options import OptionInvalid, secret
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.roles import ROLES
from halfmoon.workers.model.loading.files import load_config

if TYPE_CHECKING:
    from halfmoon.workers.worker import ChannelConfig

Where = Literal["local", "remote"]
#: A chunk's activations may be long.
MESSAGE_BYTES_MAX = 256 << 20


def decode_attention(args: argparse.Namespace, *, attention_workers: int = 0) -> Where:
    """Where a decode worker's sequences have their KV."""
    if args.decode_attention == "auto":
        return "remote" if attention_workers else "local"
    where: Where = args.decode_attention
    return where


def check_attention(args: argparse.Namespace, layout: Layout) -> None:
    """The options of `halfmoon up`, for a model of this layout. Raises OptionInvalid."""
    remote = decode_attention(args, attention_workers=args.attention) == "remote"
    if args.elastic != "off" and remote:
        raise OptionInvalid("--elastic: decode workers whose KV lies at attention workers cannot prefill")
    if not args.attention:
        if remote:
            raise OptionInvalid("--decode-attention remote: needs an attention worker, --attention 1")
        if args.attention_split != "request":
            raise OptionInvalid(
                f"--attention-split {args.attention_split}: needs attention workers, --attention"
            )
        return
    _check_split(layout, "--attention")
    if not remote:
        raise OptionInvalid("--decode-attention local: leaves nothing to do to --attention workers")
    if args.lend:
        raise OptionInvalid("--lend: decode workers whose KV lies at attention workers have none to lend")
    if args.attention_split == "heads" and layout.kv_heads % args.attention:
        raise OptionInvalid(
            f"--attention-split heads: {layout.kv_heads} KV heads do not divide by {args.attention} attention workers"
        )


def heads_of_part(args: argparse.Namespace, layout: Layout, worker_id: str) -> tuple[int, int]:
    """The first KV head of an attention worker's cache, and how many. Raises OptionInvalid."""
    parts = args.attention_parts
    if parts < 1 or layout.kv_heads % parts:
        raise OptionInvalid(f"--attention-parts {parts}: {layout.kv_heads} KV heads do not divide by it")
    if parts > 1 and args.attention_segments:
        raise OptionInvalid(f"--attention-segments: not where caches have a part of the heads, of {parts}")
    number = worker_id.rpartition("-")[2]
    if parts > 1 and not number.isdecimal():
        raise OptionInvalid(
            f"--id {worker_id}: with --attention-parts it ends in -NUMBER, by which it has its heads"
        )
    heads = layout.kv_heads // parts
    return (int(number) % parts * heads if parts > 1 else 0), heads


def channels(args: argparse.Namespace, worker_id: str, layout: Layout) -> ChannelConfig | None:
    """How the worker attends for others, or they for it; None: neither. Raises OptionInvalid."""
    duties = ROLES[args.command].duties
    if "holds" in duties:
        option, parts = "attention", args.attention_parts
    elif duties != {"batch"}:
        return None
    elif decode_attention(args) == "remote":
        option, parts = "--decode-attention remote", 1
    elif args.lend:
        option, parts = "--lend", 1
    else:
        return None
    _check_split(layout, option)
    return _channels(args, worker_id, layout, head_shares=parts)


def stage_channels(
    args: argparse.Namespace, worker_id: str, layout: Layout, *, prefills: bool
) -> ChannelConfig | None:
    """How a worker that `prefills` computes prompts together with others; None: it does not. Raises OptionInvalid."""
    if args.prefill_group == 1 or not prefills or not layout.block_bytes:
        return None
    if args.prefill_group > layout.layers:
        raise OptionInvalid(f"--prefill-group {args.prefill_group}: the model has {layout.layers} layers")
    return _channels(args, worker_id, layout, message_bytes_max=MESSAGE_BYTES_MAX)


def _channels(args: argparse.Namespace, worker_id: str, layout: Layout, **own: int) -> ChannelConfig:
    from halfmoon.bus.telemetry.version import VERSION
    from halfmoon.store.channels.hello import ChannelHello
    from halfmoon.store.channels.options import ChannelOptions, channel_secret
    from halfmoon.workers.worker import ChannelConfig

    hello = ChannelHello(
        worker_id=worker_id,
        cluster=args.cluster,
        version=VERSION,
        model=layout.model_fingerprint,
        layers=layout.layers,
        heads=load_config(args.model).heads,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        exact=layout.numerics == "exact",
        # Fast numerics have none.
        segment_tokens=max(1, layout.segment_tokens),
        dtype=layout.dtype,
        **own,
    )
    try:
        options = ChannelOptions(
            secret=channel_secret(secret(args)),
            bind=args.channel_bind,
            port=args.channel_port,
            advertise=args.channel_advertise,
            encryption=args.encryption,
        )
    except ValueError as problem:
        raise OptionInvalid(f"--channel-{problem}") from None
    return ChannelConfig(hello=hello, options=options)


def _check_split(layout: Layout, option: str) -> None:
    """Raises OptionInvalid."""
    if not layout.segment_tokens or not layout.block_bytes:
        raise OptionInvalid(f"{option}: only exact numerics of a real model split attention into segments")
