"""Times every family against its peers: `python -m benchmarks --help`."""

FAMILIES = (
    "norm",
    "gated_activation",
    "linear",
    "quantized_linear",
    "rotary",
    "cross_entropy",
    "attention",
)

ON_GPU = (*FAMILIES, "adamw")

# Suites of what is no operator: each module has a `measure` of its own.
OWN = {
    "adamw": "benchmarks.adamw.speed",
    "adamw-loss": "benchmarks.adamw.loss",
    "generate": "benchmarks.generate",
    "sentences": "benchmarks.sentences",
    "step": "benchmarks.step",
    "small": "benchmarks.small",
    "train": "benchmarks.train",
}
