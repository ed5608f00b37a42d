"""One file = one command: flags to spec, spec to executor, records to report."""
