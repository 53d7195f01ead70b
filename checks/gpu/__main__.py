"""`python -m checks.gpu once --out OUT`, or `rest`; the Makefile calls it.

`once` takes at most nine minutes. `rest` continues with the extension that it built, also for at
most nine minutes a call, until it prints that nothing is left.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from checks.gpu import dry, plan
from checks.gpu.runner import FAILED, PASSED, ROOT, Run, Step, end_on_signals

END_S = 5.0  # for the last archive
LEAST_S = 30.0  # a resumable step that has less time is left for the next call


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m checks.gpu", description=__doc__)
    add = parser.add_argument
    add("which", choices=("once", "rest"))
    add("--out", type=Path, required=True, help="folder for the results")
    add("--archive", type=Path, help="default: OUT/gpu.tgz")
    add("--only", action="append", help="run only this step; may be repeated")
    add("--dry", action="store_true", help="run no kernel: invented steps in 1/20 of the time")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    archive = (args.archive or out / "gpu.tgz").resolve()
    run = Run(out, plan.CALL_S, dry.SCALE if args.dry else 1.0)
    steps = plan.once(run) if args.which == "once" else plan.rest(run)
    if args.only:
        steps = [step for step in steps if step.name in (*args.only, plan.EXTENSION)]
    if args.dry:
        steps = [dry.replaced(step, run) for step in steps]
    end_on_signals()
    go = _once if args.which == "once" else _rest
    try:
        left = go(run, steps, archive)
    finally:
        _archive(run, archive)
        print(run.table(step.name for step in steps), flush=True)
        print(f"everything is in {archive}", flush=True)
    if left:
        print(f"left for make gpu-rest: {', '.join(left)}")
    elif args.which == "rest":
        print("nothing is left")
    failed = any(run.steps.get(step.name, {}).get("status") == FAILED for step in steps)
    return int(failed or bool(left))


def _once(run: Run, steps: Sequence[Step], archive: Path) -> list[str]:
    """Each step has its own seconds and what earlier steps saved. Returns what did not end."""
    for index, step in enumerate(steps):
        reserved = sum(later.seconds for later in steps[index + 1 :])
        run.step(step, max(LEAST_S / 3, run.left() - reserved - END_S))
        _archive(run, archive)
    return [step.name for step in steps if not _ended(run, step)]


def _rest(run: Run, steps: Sequence[Step], archive: Path) -> list[str]:
    for step in steps:
        always = step.name == plan.EXTENSION  # each call's machine may be another
        if not always and _ended(run, step):
            continue
        free = run.left() - END_S
        if free < (LEAST_S if step.resumes else step.seconds):
            continue
        run.step(step, free if step.resumes else step.seconds)
        _archive(run, archive)
    return [step.name for step in steps if not _ended(run, step)]


def _ended(run: Run, step: Step) -> bool:
    """Whether a step needs no other call: it passed or failed by itself."""
    return run.steps.get(step.name, {}).get("status") in (PASSED, FAILED)


def _archive(run: Run, path: Path) -> None:
    libraries = [] if run.scale < 1 else (ROOT / "fusedops").glob("_C_torch*")
    run.archive(path, libraries)


if __name__ == "__main__":
    sys.exit(main())
