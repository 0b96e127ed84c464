"""Telemetry of a process: metrics for Prometheus, spans for OpenTelemetry, its version."""
