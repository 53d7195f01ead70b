"""Times every family against its peers: `python -m benchmarks --help`."""

FAMILIES = ("norm", "gated_activation", "linear")

# Suites that time what is no operator, each with a `measure` of its own.
OWN = ("adamw", "step")
