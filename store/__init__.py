"""The distributed KVCache: a pool on every node, the agent that manages it, and clients."""
