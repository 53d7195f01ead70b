"""Names the benchmarks of operators and models that `python -m benchmarks` runs."""

from fusedops import backends

# Suites that are not tables of operators: each module has its own `measure`.
WORKLOADS = {
    "adamw": "benchmarks.operators.adamw",
    "adamw-loss": "benchmarks.workloads.adamw_loss",
    "few-rows": "benchmarks.workloads.few_rows",
    "generate": "benchmarks.workloads.generate",
    "models": "benchmarks.workloads.models",
    "mixtures": "benchmarks.workloads.mixtures",
    "sentences": "benchmarks.workloads.sentences",
    "step": "benchmarks.workloads.step",
    "small": "benchmarks.workloads.small",
    "sweep": "benchmarks.workloads.sweep",
    "process-memory": "benchmarks.workloads.process_memory",
}

ON_GPU = tuple(backends.FAMILIES)
FAMILIES = tuple(family for family in ON_GPU if family not in WORKLOADS)
