"""Times every family against its peers: `python -m benchmarks --help`."""

FAMILIES = ("norm", "gated_activation", "linear")
