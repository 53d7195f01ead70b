"""Runs the CPU benchmark jobs: `make figures`, or `python -m benchmarks campaign JOB ...`.

Each job writes one file of benchmarks/results/<this CPU>. A job is skipped if its file was measured
on this CPU, with this torch and this version of fusedops, so an interrupted campaign resumes.
`make profile-workloads`, `python -m benchmarks.bottlenecks.advice` and `python -m benchmarks sweep`
measure the results that have other pages.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks import FAMILIES
from benchmarks.figures.results import Result, folder_here
from benchmarks.harness import report

__all__ = ["JOBS", "Job", "reason", "run"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """A result file's name, its command without `--json FILE`, and its minutes on 2 cores."""

    name: str
    command: str
    minutes: int
    variables: tuple[tuple[str, str], ...] = ()  # of the environment


def jobs() -> Iterator[Job]:
    # Mostly the short ones first: an error shows early.
    for family in FAMILIES:
        name = f"must-show-{family.replace('_', '-')}"
        yield Job(name, f"benchmarks must-show --family {family}", MUST_SHOW.get(family, 1))
    yield Job("adamw", "benchmarks adamw", 3)
    yield Job("adamw-2-threads", "benchmarks adamw --threads 2", 3)
    yield Job("quantize-weight", "benchmarks quantized_linear --match quantize_weight", 2)
    yield Job("launch", "benchmarks launch", 5)
    yield Job("generate", "benchmarks generate", 4)
    yield Job("mixtures", "benchmarks mixtures --seconds 20", 5)
    yield Job("sentences", "benchmarks sentences", 5)
    yield Job("process-memory", "benchmarks process-memory", 18)
    yield Job("demo", "fusedops demo", 4)
    yield Job("linear", "benchmarks linear --seconds 1", 8)
    yield Job("few-rows", "benchmarks few-rows --seconds 1", 6)
    # oneDNN, which multiplies many rows and float weights, has its own variable.
    without = (("FUSEDOPS_CPU_ISA", "avx512_bf16"), ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"))
    yield Job("few-rows-without-amx", "benchmarks few-rows --seconds 1", 12, without)
    yield Job("small", "benchmarks small --seconds 1", 9)
    yield Job("models", "benchmarks models --seconds 1", 10)
    yield Job("adamw-loss", "benchmarks adamw-loss", 15)
    yield Job("step", "benchmarks step --allocator default", 35)
    yield Job("recording", "benchmarks.bottlenecks.recording", 9)


MUST_SHOW = {"attention": 4, "experts": 4, "cross_entropy": 5, "quantized_linear": 8, "linear": 2}
JOBS = {job.name: job for job in jobs()}


def run(args: Namespace) -> int:
    """Measures what is out of date. Returns 1 if a job left no result."""
    unknown = set(args.jobs) - set(JOBS)
    if unknown:
        raise SystemExit(f"no job {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    folder = Path(args.out) if args.out else folder_here()
    failed = []
    for job in (JOBS[name] for name in args.jobs or JOBS):
        path = folder / f"{job.name}.json"
        why = "asked for again" if args.again else reason(path)
        print(f"{job.name}: {f'{why}; {job.minutes} min' if why else 'current, kept'}", flush=True)
        if why and not args.list and not _measured(job, path):
            failed.append(job.name)
    if failed:
        print(f"no result of: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def reason(path: Path) -> str:
    """Says why a result is to be measured; empty if it is current."""
    if not path.exists():
        return "not measured on this CPU"
    where = Result(path).where
    here = report.stamp() | {"torch": torch.__version__}
    for name, value in here.items():
        if where.get(name) != value:
            return f"measured with {name} {where.get(name, 'unknown')}"
    return ""


def _measured(job: Job, path: Path) -> bool:
    """Runs a job in its own process. Its file replaces the earlier one only if it was written.

    A job that misses a goal exits with 1 but still writes its file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        new = Path(folder, "result.json")
        variables = os.environ | dict(job.variables)
        subprocess.run(_command(job, new), cwd=ROOT, env=variables, check=False)
        if job.name == "demo" and (demo_results := Path(folder, "demo.json")).exists():
            document = json.loads(demo_results.read_text()) | report.stamp()
            new.write_text(report.dump(document))
        if not new.exists():
            return False
        path.write_text(new.read_text())
    return True


def _command(job: Job, new: Path) -> list[str]:
    command = [sys.executable, "-m", *job.command.split()]
    if job.name == "demo":
        return [*command, "--out", str(new.parent)]
    return [*command, "--json", str(new)]
