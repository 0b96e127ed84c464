"""Where a request runs, as pure functions of the state: nothing here changes it. Begin at `candidates`."""
