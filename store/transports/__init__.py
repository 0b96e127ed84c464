"""Ways to move blocks between nodes: shared memory, TCP, RDMA, and the engine that picks one."""
