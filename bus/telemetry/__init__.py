"""What a process tells about itself to operators: metrics for Prometheus, spans for OpenTelemetry, its
version.
"""
