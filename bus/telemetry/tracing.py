"""OpenTelemetry spans of one process: off unless an OTLP endpoint is named; then one trace from client to
last token.

A span is reported afterwards, with its beginning and end (ns of the wall clock), under a parent that is a W3C
traceparent: so nothing has to be carried through the code but that text, and it is "" where there is nothing to trace.
OpenTelemetry is imported only when it is switched on. Spans leave by a thread of its own; when the endpoint does not
take them they are dropped, with one line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Span as OtelSpan

Value = str | int | float | bool | Sequence[str]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
#: Of spans that wait when the process ends.
CLOSE_S = 2.0
_TRACEPARENT = re.compile(
    r"^(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})$"
)

log = logging.getLogger(__name__)


class TracingImpossible(Exception):
    """Tracing was asked for and is impossible; the text has the reason."""


def checked_traceparent(text: str) -> str:
    """`text` when it is a W3C traceparent, else ""."""
    return text if _TRACEPARENT.match(text) else ""


def wanted() -> bool:
    """By OpenTelemetry's own variables."""
    said = os.environ.get
    on = said(ENDPOINT) or said("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    off = said("OTEL_SDK_DISABLED", "").lower() == "true" or said("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    return bool(on) and not off


def wall_ns(monotonic_ns: int) -> int:
    """The wall clock when the monotonic clock of this process was so."""
    return monotonic_ns + time.time_ns() - time.monotonic_ns()


class Tracing:
    """Made by `start`. May be called from the event loop: it blocks for nothing."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("halfmoon")

    def begin(
        self, name: str, parent: str, begin_ns: int, attributes: Mapping[str, Value], *, server: bool = False
    ) -> OpenSpan | None:
        """A span whose children are reported before its end. `server`: it answers a client. None: not sampled."""
        from opentelemetry.trace import SpanKind

        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        span = self._tracer.start_span(
            name, context=_context(parent), kind=kind, attributes=dict(attributes), start_time=begin_ns
        )
        return OpenSpan(span) if span.is_recording() else None

    def span(
        self,
        name: str,
        parent: str,
        begin_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value] | None = None,
        *,
        error: str = "",
    ) -> None:
        """One that is over."""
        opened = self.begin(name, parent, begin_ns, attributes or {})
        if opened is not None:
            opened.end(max(begin_ns, end_ns), error=error)

    def close(self) -> None:
        """Send waiting spans, within `CLOSE_S`."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class OpenSpan:
    """Until `end`."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def event(self, name: str, at_ns: int) -> None:
        self._span.add_event(name, timestamp=at_ns)

    def child(self, tracing: Tracing, name: str, begin_ns: int, end_ns: int) -> None:
        tracing.span(name, self.traceparent, begin_ns, end_ns)

    def end(self, end_ns: int, attributes: Mapping[str, Value] | None = None, *, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes or {}))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(end_ns)


def _context(parent: str):  # type: ignore[no-untyped-def]  # OpenTelemetry's Context, which we may not have
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    found = _TRACEPARENT.match(parent)
    if found is None:
        return Context()
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(remote), Context())


def start(*, role: str, process_id: str, cluster: str, endpoint: str = "") -> Tracing | None:
    """None when neither `endpoint` nor the environment asks for it. Raises TracingImpossible."""
    if endpoint:
        os.environ[ENDPOINT] = endpoint
    if not wanted():
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    except ImportError as problem:
        raise TracingImpossible(f"{problem}: pip install 'halfmoon[otel]'") from None
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol not in (None, "", "http/protobuf"):
        raise TracingImpossible(f"OTEL_EXPORTER_OTLP_PROTOCOL {protocol}: only http/protobuf is spoken here")

    class Exporter(OTLPSpanExporter):
        """Logs once that spans are lost, and once that they are taken again."""

        lost = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = super().export(spans)
            if (failed := result is not SpanExportResult.SUCCESS) != self.lost:
                self.lost = failed
                how = "does not take spans: they are dropped" if failed else "takes spans again"
                log.warning("tracing: %s %s", self._endpoint, how)
            return result

    # It logs the same for every batch, with a traceback.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"halfmoon-{role}"}
    about = {**named, "service.namespace": cluster, "service.instance.id": process_id, "halfmoon.role": role}
    with contextlib.suppress(ImportError):
        from importlib.metadata import version

        about["service.version"] = version("halfmoon")
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Exporter()))
    return Tracing(provider)
