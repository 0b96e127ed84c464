"""NATS: connection, request/reply, the event log's append and ordered read, an embedded server."""
