"""Switching OpenTelemetry on, for the processes of a cluster."""

from __future__ import annotations

import argparse
import sys

from halfmoon.bus.telemetry.tracing import Tracing, TracingImpossible, start
from halfmoon.cli.options import OptionInvalid


def check_endpoint(args: argparse.Namespace) -> None:
    """Raises OptionInvalid."""
    if args.otlp and not args.otlp.startswith(("http://", "https://")):
        raise OptionInvalid(f"--otlp {args.otlp}: http:// or https://, as in http://127.0.0.1:4318")


def start_tracing(args: argparse.Namespace, role: str, process_id: str) -> Tracing | None:
    """None where nothing asks for tracing. Asked for by the option, it must be possible: raises OptionInvalid. A
    variable of the environment may be meant for others: then a line reports it, and the process goes on without."""
    check_endpoint(args)
    try:
        return start(role=role, process_id=process_id, cluster=args.cluster, endpoint=args.otlp)
    except TracingImpossible as problem:
        if args.otlp:
            raise OptionInvalid(f"--otlp: {problem}") from None
        print(f"halfmoon: warning: no traces: {problem}", file=sys.stderr, flush=True)
        return None


def stop_tracing(tracing: Tracing | None) -> None:
    """Send waiting spans, for a moment."""
    if tracing is not None:
        tracing.close()
