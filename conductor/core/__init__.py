"""The decisions: a pure function of the log. Begin at `machine`; no file here knows a clock, a socket or a
file.
"""
