"""The decode worker: loads KVCache as it arrives and generates tokens in a running batch."""
