"""`python -m benchmarks.bottlenecks.patching`: patch's predicted saving against the measured one.

Small models of four architectures, built from configs, in several kinds of steps. The saving of
time is predicted by `fusedops.profile` and measured as `Profile.measure` does, each as a share of
the step that was measured with it: the machine's speed may change in between. The saving of memory
is measured by the peaks of two steps. A row is excluded if the measured interval contains 0.
docs/profile_patch.md is written from the results.
"""

import argparse
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn

import fusedops
from benchmarks.bottlenecks.models import CONFIGS, KINDS, VOCABULARY, workload
from benchmarks.harness import report
from fusedops.profiling.advice.experiment import compare_blocks, fewest_seconds, saving
from fusedops.profiling.storage.measured import measure_memory

RESULTS = "benchmarks/results/intel-xeon/profile-patch.json"
PAGE = "docs/profile_patch.md"
HEADER = """# What patch saves: predicted and measured

`python -m benchmarks.bottlenecks.patching` writes this page. `fusedops.profile` predicts what
`fusedops.patch` saves of a step ([profile.md](profile.md#how-patch-is-predicted)), and
blocks of steps with and without it measure the saving. Savings of time are shares of the step; a
negative one is a slower step. Models have four layers of 256 and 4000 words; the steps are batches
of 4 x 128 tokens with AdamW, in float32, unless the name says otherwise: bfloat16, eager attention,
long (1 x 512), few (1 x 16), forward (no gradients).
"""


@dataclass(frozen=True)
class Row:
    """A step's savings, of time as shares of it. low, high: the 95 % interval of the measured.

    step: its seconds while its saving was measured.
    """

    model: str
    kind: str
    step: float
    predicted: float
    measured: float
    low: float
    high: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def excluded(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def right(self) -> bool:
        """Whether the prediction is within a factor of 2, with the right sign."""
        return 0.5 <= self.predicted / self.measured <= 2


def row(name: str, of: str, budget_s: float) -> Row:
    kind = KINDS[of]
    model, optimizer, step = workload(name, kind)
    data = [torch.randint(0, VOCABULARY, (kind.batch, kind.length)) for _ in range(40)]
    about = {"data": data, "model": model, "optimizer": optimizer}
    profile = fusedops.profile(step, **about, steps=8, budget_s=budget_s)
    (advice,) = (one for one in profile.advice if one.id == "patch")
    assert advice.predicted is not None, profile.verdict.not_checked
    profiled = profile.evidence.cached or profile.evidence.plain
    step(data[0])  # makes the optimizer's state
    call, change = partial(step, data[0]), partial(fusedops.patched, model)
    budget_s = max(budget_s, 1.2 * fewest_seconds(profile.time.seconds))
    without, changed = compare_blocks(call, change, budget_s)
    base, found = median(without), saving(without, changed)
    assert found.seconds is not None and found.interval is not None
    assert advice.predicted.seconds is not None and advice.predicted.bytes is not None
    peaks = list(_peaks(model, optimizer, call))
    return Row(
        *(name, of, base, advice.predicted.seconds / median(profiled.running)),
        *(found.seconds / base, *(end / base for end in found.interval)),
        *(advice.predicted.bytes, peaks[0] - peaks[1]),
    )


def _peaks(model: nn.Module, optimizer: Any, call: Callable[[], None]) -> Iterator[int]:
    yield measure_memory(call, model=model, optimizer=optimizer).peak
    with fusedops.patched(model):
        yield measure_memory(call, model=model, optimizer=optimizer).peak


def table(rows: list[Row]) -> Iterator[str]:
    yield "| model | step | ms | predicted | measured (95 %) | predicted MiB | measured MiB |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for r in rows:
        times = f"{r.step * 1e3:.0f} | {r.predicted:.1%}"
        measured = f"{r.measured:.1%} ({r.low:.1%}..{r.high:.1%})"
        sizes = f"{r.predicted_bytes / 2**20:.1f} | {r.measured_bytes / 2**20:.1f}"
        yield f"| {r.model} | {r.kind} | {times} | {measured} | {sizes} |"
    judged = [r for r in rows if not r.excluded]
    signs = sum((r.predicted > 0) == (r.measured > 0) for r in judged)
    right = sum(r.right for r in judged)
    yield f"\n{len(rows) - len(judged)} of {len(rows)} rows excluded. Of the {len(judged)} others:"
    yield f"the sign is right in {signs}, and the factor is at most 2 in {right}."


def page(document: dict[str, Any]) -> str:
    """docs/profile_patch.md, from a document of results."""
    found, load = document["environment"], document["load"]
    where = f"{found['device']}, {found['threads']} thread, torch {found['torch']}"
    lines = table([Row(**one) for one in document["rows"]])
    return "\n".join((HEADER, f"{where}, {found['date'][:10]}; load {load}.", "", *lines, ""))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bottlenecks.patching")
    parser.add_argument("models", nargs="*", default=list(CONFIGS), help="all without one")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument(
        "--budget",
        type=float,
        default=40.0,
        help="seconds of a profile, and at least of a measurement",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", default=RESULTS, help="results (default %(default)s)")
    parser.add_argument("--markdown", default=PAGE, help="page (default %(default)s)")
    parser.add_argument("--only-write", action="store_true", help="write the page from the results")
    args = parser.parse_args()
    if not args.only_write:
        torch.set_num_threads(args.threads)
        transformers.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        rows, loads = [], []
        for name in args.models:
            for kind in args.kinds:
                rows.append(row(name, kind, args.budget))
                loads.append(os.getloadavg()[0])
                print(rows[-1], flush=True)
        load = f"{min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} CPUs"
        report.save(args, [asdict(one) for one in rows], [], load=load)
    Path(args.markdown).write_text(page(json.loads(Path(args.json).read_text())))


if __name__ == "__main__":
    main()
