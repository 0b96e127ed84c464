"""The processes of a cluster, one command each: `conductor`, `store`, `prefill`, `decode`, `frontend`.

`halfmoon up`, compose and Kubernetes all run these. Each says on standard error what it does, ends on SIGTERM or SIGINT
after draining, with status 0, and with status 1 and one line when it cannot start.
"""
