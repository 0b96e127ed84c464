"""HTTP for whoever asks: a server that bears hostile, broken and slow clients, and the page of a process's metrics."""
