"""The demo trains one model with and without fusedops: `python -m fusedops demo`."""

import json
import random
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch

from fusedops.demo import show
from fusedops.demo.peak import measure_peaks
from fusedops.demo.training import CONTENDERS, QUICK, Settings, Trainer, batches
from fusedops.profiling.timing import environment, paired_ratio

__all__ = ["run"]

NEEDS = ("transformers", "tqdm")
BUDGET_S = 120.0  # a slow machine trains fewer steps, so that the demo stays below 3 minutes


def run(
    steps: int | None = None,
    threads: int = 1,
    out: str | Path = "demo",
    quick: bool = False,
) -> dict:
    """Trains a 10M-parameter Llama twice on the standard library's source: eager and fused.

    Same seed, same batches, bfloat16. Eager uses `torch.optim.AdamW`; fused uses `AdamW8bit`, which
    rounds the weights stochastically. In each step both train on the batch, in random order, so
    that a noisy machine disturbs both alike. Speed is the median over steps of eager's time divided
    by fused's. Peak memory is measured in a fresh process for each.

    Prints the patch report and a table, writes loss and step times to `out`/demo.png (if matplotlib
    is installed) and every number to `out`/demo.json, and returns what the JSON contains. It uses
    one thread by default: several threads wait for each other whenever another process takes a
    core. quick: a tiny model, 8 steps. Raises ModuleNotFoundError with an install command if a
    package is missing, and ValueError if steps is too small.
    """
    _require()
    settings = _settings(steps, quick)
    torch.set_num_threads(threads)
    peaks = measure_peaks(settings, threads)
    trainers = {name: Trainer(name, settings) for name in CONTENDERS}
    report = str(trainers["fused"].report)
    print(report)
    _train(trainers, settings)
    results = environment(threads, torch.device("cpu")) | {"settings": asdict(settings)}
    results |= show.summary(trainers, peaks, settings) | {"report": report}
    _write(results, Path(out))
    return results


def _settings(steps: int | None, quick: bool) -> Settings:
    settings = QUICK if quick else Settings()
    if steps is not None and steps <= show.WARMUP:
        raise ValueError(f"demo: steps must be more than {show.WARMUP} (warm-up), got {steps}")
    return replace(settings, steps=steps or settings.steps)


def _require() -> None:
    missing = [package for package in NEEDS if find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(
            f"demo: needs {', '.join(missing)}: pip install 'fusedops[bench,hf]'"
        )


def _train(trainers: dict[str, Trainer], settings: Settings) -> None:
    """Trains every contender on every batch, in an order drawn for each step."""
    from tqdm import tqdm

    order, start = random.Random(settings.seed), perf_counter()
    bar = tqdm(batches(settings), total=settings.steps, desc="training both", unit="step")
    for done, tokens in enumerate(bar, 1):
        for name in order.sample(CONTENDERS, len(CONTENDERS)):
            trainers[name].step(tokens)
        bar.set_postfix(loss=f"{trainers['fused'].losses[-1]:.3f}", speed=_so_far(**trainers))
        if show.WARMUP < done < settings.steps and perf_counter() - start > BUDGET_S:
            bar.write(f"stopped after {done} of {settings.steps} steps: {BUDGET_S:.0f} s are up")
            break
    bar.close()


def _so_far(eager: Trainer, fused: Trainer) -> str:
    enough = len(eager.seconds) > show.WARMUP
    ratio = paired_ratio(show.timed(eager), show.timed(fused), resamples=1) if enough else None
    return f"{ratio.median:.2f}x" if ratio else "warming up"


def _write(results: dict, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.json").write_text(json.dumps(results, indent=1))
    written = [out / "demo.json"]
    if find_spec("matplotlib"):
        show.plot(results, out / "demo.png")
        written.insert(0, out / "demo.png")
    _print(show.table(results))
    print(show.verdict(results))
    print(f"wrote {' and '.join(map(str, written))}")
    if len(written) == 1:
        print("to plot them: pip install matplotlib")


def _print(table: object) -> None:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(table)
    else:
        Console().print(table)
