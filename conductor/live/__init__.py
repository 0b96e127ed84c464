"""The live shell: feeds the log to the core and publishes what it decides."""
