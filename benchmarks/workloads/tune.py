"""Tunes the demo's training, then times the code that tune prints: `python -m benchmarks tune`.

It tunes once for throughput, and once under a p95 budget of three quarters of the baseline's p95. A
child process alternates the plain step and the printed code's step, and their ratio must agree with
the reported one: within 5 %, or within its interval.
"""

import json
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedops
from benchmarks.harness import goals, report
from fusedops.demo.training import QUICK as TINY
from fusedops.demo.training import Settings as Demo
from fusedops.demo.training import build_model, corpus, fast_dtype
from fusedops.measuring.ratios import Ratio, paired_ratio
from fusedops.tuning.trial import Tuning

FULL = Demo(batch=8, dtype=fast_dtype())
BUDGET, QUICK_BUDGET = 240.0, 25.0
SHARE = 0.75  # of the baseline's p95
NEAR = 0.05
PAIRS, WARMUP = 30, 3
CHILD = "benchmarks.workloads.tune"


def measure(args: Namespace) -> int:
    """Tunes for both goals. Returns the exit status: 1 if the printed code is not as fast."""
    demo, budget = (TINY, QUICK_BUDGET) if args.quick else (FULL, BUDGET)
    knobs = ["patch", "fused_adamw", "adamw8bit", "micro_batch"] if args.quick else None
    rows, verdicts = [], []
    p95: float | None = None
    for name in ("throughput", "p95 budget"):
        start = time.monotonic()
        tuning = _tuned(demo, knobs, budget, p95)
        seconds = time.monotonic() - start
        print(f"{name}\n{tuning}", flush=True)
        again = _in_a_child(tuning, demo, args.threads)
        rows.append(tuning.to_dict() | {"title": name, "took_s": seconds, "again": list(again)})
        verdicts += [_agrees(name, tuning.ratio, again), _in_time(name, seconds, budget)]
        p95 = SHARE * (tuning.trials[0].measured.p95 or tuning.trials[0].measured.seconds)
    report.save(args, rows, verdicts)
    return int(any(not verdict["met"] for verdict in verdicts))


def _make_batch(demo: Demo, text: Tensor, batch: int, length: int | None) -> dict[str, Tensor]:
    starts = torch.randint(len(text) - demo.length, (batch, 1))
    ids = text[starts + torch.arange(demo.length)]
    return {"input_ids": ids, "labels": ids}


def _tuned(demo: Demo, knobs: list[str] | None, budget: float, p95: float | None) -> Tuning:
    model = build_model(demo)
    return fusedops.tune(
        partial(_make_batch, demo, corpus()),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=demo.lr),
        batch=demo.batch,
        length=demo.length,
        knobs=knobs,
        p95=p95,
        budget_s=budget,
    )


def _agrees(name: str, reported: Ratio, again: Ratio) -> dict:
    near = abs(again.median / reported.median - 1) <= NEAR
    inside = reported.low <= again.median <= reported.high
    title = f"{name}: the printed code in a fresh process"
    entry = {"title": title, "what": "baseline", "asked": reported.median, "measured": again}
    return entry | {"met": near or inside}


def _in_time(name: str, seconds: float, budget: float) -> dict:
    entry = {
        "title": f"{name}: budget",
        "what": goals.SECONDS,
        "asked": budget,
        "measured": seconds,
    }
    return entry | {"met": seconds <= budget}


def _in_a_child(tuning: Tuning, demo: Demo, threads: int) -> Ratio:
    """The printed code against the plain step, in turns, in a process of their own."""
    given = {"code": tuning.code, "batch": tuning.best.batch, "threads": threads}
    given["tiny"] = demo == TINY
    given["base"] = tuning.trials[0].setting.batch
    command = [sys.executable, "-m", CHILD]
    run = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, check=True
    )
    pairs = json.loads(run.stdout.splitlines()[-1])
    return paired_ratio(
        *(
            [s / size for s in pairs[k]]
            for k, size in (("plain", given["base"]), ("tuned", tuning.best.batch))
        )
    )


def _child() -> None:
    given: dict[str, Any] = json.loads(sys.stdin.read())
    torch.set_num_threads(given["threads"])
    demo, text = (TINY if given["tiny"] else FULL), corpus()
    defined: dict[str, Any] = {}
    exec(given["code"], defined)
    model = build_model(demo)
    optimizer = torch.optim.AdamW(model.parameters(), lr=demo.lr)
    other = build_model(demo)
    _, _, tuned = defined["tuned"](other, torch.optim.AdamW(other.parameters(), lr=demo.lr))
    after = torch.get_num_threads()

    def plain(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    steps = {
        "plain": (plain, given["base"], given["threads"]),
        "tuned": (tuned, given["batch"], after),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(WARMUP + PAIRS):
        for name in list(steps)[:: 1 if round_ % 2 else -1]:
            step, size, threads = steps[name]
            torch.set_num_threads(threads)
            start = time.perf_counter()
            step(_make_batch(demo, text, size, None))
            seconds[name].append(time.perf_counter() - start)
    print(json.dumps({name: values[WARMUP:] for name, values in seconds.items()}))


if __name__ == "__main__":
    _child()
