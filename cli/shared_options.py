"""Options that all processes have, or all that read the model."""

from __future__ import annotations

import argparse
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from halfmoon.schemas.types import option


class SharedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every process that `halfmoon up` takes as well."""

    title: ClassVar[str] = "process"

    secret_file: Annotated[
        str, option("what all processes of the cluster share; keys and data plane", "FILE")
    ] = ""
    otlp: Annotated[
        str,
        option(
            "send OpenTelemetry spans there (OTLP over HTTP); also by OTEL_EXPORTER_OTLP_ENDPOINT and its "
            "like",
            "URL",
        ),
    ] = ""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Annotated[Literal["text", "json"], option("json: an object a line, of processes")] = "text"


class ProcessOptions(SharedOptions, frozen=True, kw_only=True):
    """All options of every process, but how to reach NATS (`options.add_bus`), as commands without msgspec have it."""

    metrics: Annotated[str, option("serve /metrics for Prometheus there", "HOST:PORT")] = ""
    drain_s: Annotated[float, option("how long to finish what runs, when stopped")] = 20.0
    health_file: Annotated[str, option("touched every second while all is well", "FILE")] = ""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how its numbers are kept; the same for all processes of a cluster."""

    title: ClassVar[str] = "model"

    model: Annotated[str, option("a built-in name, a .gguf file, or a Hugging Face directory")] = (
        "smollm2-135m-instruct"
    )
    engine: Annotated[Literal["torch", "null"], option("null computes nothing")] = "torch"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    numerics: Literal["auto", "exact", "fast"] = "auto"
    device: Annotated[str, option("cpu, cuda, cuda:1; auto takes CUDA where there is one")] = "auto"
    block_tokens: Annotated[int, option("tokens of one KV block, 16 to 512", ge=16, le=512)] = 256
    layout_file: Annotated[str, Meta(extra={"metavar": "FILE", "help": argparse.SUPPRESS})] = ""
