"""The command line of the GPU checks: `python -m checks.gpu once --out OUT`, or `rest`.

`once` takes at most nine minutes. `rest` continues with the extension that it built, also for at
most nine minutes a call, until it prints that nothing is left.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from checks.gpu import dry, plan
from checks.gpu.runner import (
    FAILED,
    GRACE_S,
    LATE,
    NOT_RUN,
    PASSED,
    ROOT,
    Run,
    Step,
    end_on_signals,
)

END_S = 5.0  # for the last archive
SHORT_S = 10.0  # a step that has less time is left for the next call
LEAST_S = 30.0  # the same for a step that `rest` resumes
LONGEST_S = 420.0  # the most that a step that cannot be resumed gets, after it was late


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
        names = [step.name for step in steps]
        if unknown := set(args.only) - {*names}:
            parser.error(f"--only must be one of {', '.join(names)}, got {', '.join(unknown)}")
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
    if left and args.which == "once" and not run.passed(plan.BUILD):
        print(f"nothing runs without a build: make gpu-once builds again, see {out}/build.log")
    elif left:
        print(f"left for make gpu-rest: {', '.join(left)}")
    elif args.which == "rest":
        print("nothing is left")
    failed = any(run.steps.get(step.name, {}).get("status") == FAILED for step in steps)
    return int(failed or bool(left))


def _once(run: Run, steps: Sequence[Step], archive: Path) -> list[str]:
    """A step has its own seconds, what earlier steps saved, and those of steps that need it."""
    for index, step in enumerate(steps):
        free = run.left() - END_S
        if free < SHORT_S:
            continue
        later = [other for other in steps[index + 1 :] if step.name not in other.needs]
        saved = free - sum(other.seconds for other in later)
        run.step(step, min(free, max(step.seconds, saved)))
        _archive(run, archive)
    return [step.name for step in steps if not _ended(run, step)]


def _rest(run: Run, steps: Sequence[Step], archive: Path) -> list[str]:
    for step in steps:
        always = step.name == plan.EXTENSION  # each call's machine may be another
        if not always and _ended(run, step):
            continue
        free, seconds = run.left() - END_S, _seconds(run, step)
        if free < (LEAST_S if step.resumes else seconds):
            continue
        run.step(step, free if step.resumes else seconds)
        _archive(run, archive)
    return [step.name for step in steps if not _ended(run, step)]


def _seconds(run: Run, step: Step) -> float:
    """A step that cannot be resumed gets twice the time of the call in which it was late."""
    found = run.steps.get(step.name, {})
    late = found.get("status") == LATE
    return min(LONGEST_S, max(step.seconds, 2 * found["seconds"])) if late else step.seconds


def _ended(run: Run, step: Step) -> bool:
    """Whether a step needs no other call.

    A step that can be resumed has not ended if it crashed: it exits with 1 if its work is done and
    something was wrong. One that cannot be resumed is given up if LONGEST_S were not enough.
    """
    found = run.steps.get(step.name, {"status": NOT_RUN})
    if found["status"] == FAILED:
        return not step.resumes or found["code"] == 1
    given_up = found["status"] == LATE and not step.resumes
    given_up = given_up and found["seconds"] >= LONGEST_S - 2 * GRACE_S
    return found["status"] == PASSED or given_up


def _archive(run: Run, path: Path) -> None:
    libraries = [] if run.scale < 1 else (ROOT / "fusedops").glob("_C_torch*")
    try:
        run.archive(path, libraries)
    except OSError as error:  # a file vanished, or the disk is full: the steps go on
        print(f"{path} could not be written: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
