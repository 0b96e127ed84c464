"""One node's blocks in one shared memory segment: slots, leases, eviction, checksums."""
