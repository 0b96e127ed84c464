"""The process that owns a node's pool and answers workers, clients and other agents."""
