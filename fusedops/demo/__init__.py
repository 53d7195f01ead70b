"""The demo trains one model in four ways: `python -m fusedops demo`."""

import json
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch

from fusedops.demo import show
from fusedops.demo.peak import in_fresh_processes
from fusedops.demo.training import (
    COMPILED,
    CONTENDERS,
    EAGER,
    FUSED,
    QUICK,
    Settings,
    Trainer,
    batches,
    fast_dtype,
    why_not,
)
from fusedops.measuring.environment import environment
from fusedops.measuring.ratios import paired_ratio

__all__ = ["run"]

NEEDS = ("transformers", "tqdm")
BUDGET_S = 150.0  # a slow machine trains fewer steps, so that training stays below 3 minutes
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def run(
    steps: int | None = None,
    threads: int = 1,
    out: str | Path = "demo",
    quick: bool = False,
) -> dict:
    """Trains a 10M-parameter Llama in four ways on the standard library's source.

    Eager uses `torch.optim.AdamW`; then eager with torch's own fused AdamW; `torch.compile` with
    that optimizer; and fusedops with `AdamW8bit`, which rounds the weights stochastically. Same
    seed, same batches, in bfloat16; in float32 on CPUs without AVX-512. In each step all train on
    the batch, in random order, so that a noisy machine disturbs all alike. Speed is the median over
    steps of eager's time divided by another's. No step includes torch.compile's compilation, whose
    time is printed; without a C++ compiler its row says so. Peak memory is measured in a fresh
    process for each, and includes the compiler's; the compilation is timed there, too.

    Prints the patch report and a table, writes loss and step times to `out`/demo.png (if matplotlib
    is installed) and every number to `out`/demo.json, and returns what the JSON contains. Training
    takes at most 3 minutes. It uses one thread by default: several threads wait for each other
    whenever another process takes a core. quick: a tiny model, 8 steps. Raises ModuleNotFoundError
    with an install command if a package is missing, and ValueError if steps is too small, threads
    is below 1, or out is no folder.
    """
    _require()
    settings = _settings(steps, quick)
    if threads < 1:
        raise ValueError(f"demo: threads must be at least 1, got {threads}")
    _make(Path(out))
    torch.set_num_threads(threads)
    unavailable = {name: reason for name in CONTENDERS if (reason := why_not(name))}
    names = [name for name in CONTENDERS if name not in unavailable]
    with _empty_cache():
        fresh = in_fresh_processes(names, settings, threads)
        trainers = {name: Trainer(name, settings) for name in names}
        report = str(trainers[FUSED].report)
        print(report)
        _train(trainers, settings)
    results = environment(threads, torch.device("cpu")) | {"settings": asdict(settings)}
    results |= show.summary(trainers, fresh, settings) | {"report": report}
    _write(results | {"unavailable": unavailable}, Path(out))
    return results | {"unavailable": unavailable}


def _settings(steps: int | None, quick: bool) -> Settings:
    settings = QUICK if quick else Settings()
    if steps is not None and steps <= show.WARMUP:
        raise ValueError(f"demo: steps must be more than {show.WARMUP} (warm-up), got {steps}")
    return replace(settings, steps=steps or settings.steps, dtype=fast_dtype())


def _make(folder: Path) -> None:
    """Before the training: its results would be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"demo: out must be a folder, got {folder}: {error}") from error


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
    if COMPILED in trainers:
        trainers[COMPILED].compile(next(batches(settings)))
    bar = tqdm(batches(settings), total=settings.steps, desc="training all", unit="step")
    for done, tokens in enumerate(bar, 1):
        for name in order.sample([*trainers], len(trainers)):
            trainers[name].step(tokens)
        bar.set_postfix(loss=f"{trainers[FUSED].losses[-1]:.3f}", speed=_so_far(trainers))
        if show.WARMUP < done < settings.steps and perf_counter() - start > BUDGET_S:
            bar.write(f"stopped after {done} of {settings.steps} steps: {BUDGET_S:.0f} s are up")
            break
    bar.close()


@contextmanager
def _empty_cache() -> Iterator[None]:
    """torch.compile keeps its code in a new folder, here and in the processes that start here."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get(CACHE)
        os.environ[CACHE] = folder
        try:
            yield
        finally:
            os.environ.pop(CACHE) if before is None else os.environ.update({CACHE: before})


def _so_far(trainers: dict[str, Trainer]) -> str:
    """How many times as fast as eager fused is."""
    eager, fused = (show.timed(trainers[name]) for name in (EAGER, FUSED))
    return f"{paired_ratio(eager, fused, resamples=1).median:.2f}x" if eager else "warming up"


def _write(results: dict, out: Path) -> None:
    (out / "demo.json").write_text(json.dumps(results, indent=1))
    written = [out / "demo.json"]
    if find_spec("matplotlib"):
        show.plot(results, out / "demo.png")
        written.insert(0, out / "demo.png")
    print(f"\nSame model, same batches, steps in random order\n\n{show.table(results)}\n")
    print(show.notes(results))
    print(show.verdict(results))
    print(f"wrote {' and '.join(map(str, written))}")
    if len(written) == 1:
        print("to plot them: pip install matplotlib")
