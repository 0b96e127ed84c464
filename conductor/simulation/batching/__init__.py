"""Workers that prefill and decode in one loop, iteration by iteration, with the batch former that runs live."""
