"""`fusedops profile`: profiles a script, a transformers model or a torch.profiler trace."""

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fusedops.machine import available_memory
from fusedops.measuring.arguments import check_whole
from fusedops.profiling.collect.trace import read_trace
from fusedops.profiling.planning.models import (
    check_positions,
    config_of,
    language_model_of,
    startable,
)
from fusedops.profiling.recording import Recording
from fusedops.profiling.report import Profile
from fusedops.profiling.run import profile

__all__ = [
    "TRAINED",
    "build",
    "profile_model",
    "profile_script",
    "profile_trace",
]

WARMUP = 2  # steps of a script that do not count; in the last of them its operators are recorded
TRAINED = 4  # parameters, gradients and AdamW's two moments


def profile_script(
    script: str,
    arguments: Sequence[str],
    steps: int,
    experiments: bool | None = False,
    budget_s: float = 60.0,
) -> tuple[Profile, SystemExit | None]:
    """Runs a script, and records its training steps; prints the report after the last of them.

    Model, optimizer and batches are found while they run. The script runs to its end as
    `python script arguments` would. The report comes with the SystemExit that ended the script, for
    the caller to raise.

    experiments: runs those of `fusedops.profile` on the script's model, between two of its steps,
    for about `budget_s` seconds, and puts everything back; None asks on the terminal.

    Raises FileNotFoundError without the script, and RuntimeError if it ends before the optimizer
    has made a step after 2 of warm-up, unless it exits with a code of failure, which is passed on.
    """
    if not Path(script).is_file():
        raise FileNotFoundError(f"profile: script must be a file, got {script}")
    reports: list[Profile] = []
    is_wanted = False  # experiments, which were not begun yet

    def done() -> None:
        nonlocal is_wanted
        reports.append(record.report())
        print(reports[0], file=sys.stderr, flush=True)
        is_wanted = wants_experiments(experiments, budget_s)
        if is_wanted:
            record.before_next_forward(experiment)

    def experiment() -> None:
        nonlocal is_wanted
        if not is_wanted:  # these are the experiments' own forwards
            return
        is_wanted = False
        try:
            reports.append(record.experiments(budget_s))
        except Exception as error:  # noqa: BLE001  the script goes on
            print(f"profile: no experiments, {error}", file=sys.stderr, flush=True)
        else:
            print(reports[-1], file=sys.stderr, flush=True)

    keep = experiments or (experiments is None and has_terminal())
    record = Recording(warmup=WARMUP, limit=steps, keep=keep, done=done)
    saved, sys.argv = sys.argv, [script, *arguments]
    sys.path.insert(0, str(Path(script).parent.resolve()))
    ended: SystemExit | None = None
    record.start()
    try:
        runpy.run_path(str(Path(script).absolute()), run_name="__main__")  # it may change folder
    except SystemExit as error:
        ended = error
    except Exception:
        if not reports and record.steps:
            print(record.report(), file=sys.stderr, flush=True)
        raise
    finally:
        record.stop()
        sys.path.pop(0)
        sys.argv = saved
    if not reports:
        if not record.steps:
            if ended is not None and ended.code:
                raise ended
            raise RuntimeError(
                f"profile: {script} must make more than {WARMUP} optimizer steps; none was recorded"
            )
        done()
    experiment()  # if the script had no other forward
    return reports[-1], ended


def has_terminal() -> bool:
    """Whether a question can be asked."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def wants_experiments(answer: bool | None, budget_s: float) -> bool:
    """The answer, or the user's on the terminal; without a terminal it is no."""
    if answer is not None or not has_terminal():
        return bool(answer)
    print(
        f"profile: run experiments on the script's model for about {budget_s:.0f} s, and put "
        "everything back? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def profile_model(
    name: str, batch: int, length: int, steps: int, budget_s: float, dtype: str, device: str = "cpu"
) -> Profile:
    """Trains a model with AdamW on random tokens, and profiles the step. See `build` for names.

    Raises ValueError for a device that torch does not find, and for an empty batch.
    """
    check_whole("profile", "batch", batch)
    check_whole("profile", "length", length)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"profile: device must be one that torch finds, got {device}")
    model = build(name, dtype, copies=TRAINED if device == "cpu" else 1)
    check_positions(model, length, "profile")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(inputs: dict[str, torch.Tensor]) -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    ids = torch.randint(model.config.vocab_size, (2, batch, length), device="cpu").to(device)
    inputs = [{"input_ids": rows, "labels": rows} for rows in ids]
    data = (inputs[i % 2] for i in range(10**9))
    return profile(
        step, data=data, model=model, optimizer=optimizer, steps=steps, budget_s=budget_s
    )


def profile_trace(path: str) -> Profile:
    """The verdict on steps that torch.profiler recorded; see `read_trace`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"profile: trace must be a file, got {path}")
    return Profile(read_trace(path))


def build(name: str, dtype: str = "float32", caller: str = "profile", copies: int = TRAINED) -> Any:
    """A transformers model with random weights, in training mode.

    name: a folder with config.json, a config.json, a model_type such as "llama", or a name of the
    hub's that is already cached: nothing is downloaded. copies: how many times the parameters'
    memory the caller will use. Raises ModuleNotFoundError without transformers, and ValueError for
    another name, for a model without a language modelling head, or if that memory is not available;
    the message starts with `caller`.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError(
            f"{caller}: model needs transformers, which is missing: pip install 'fusedops[hf]'"
        )
    config = config_of(name, f"{caller}: model")
    config.use_cache = False
    cls = language_model_of(config)
    if cls is None:
        raise ValueError(
            f"{caller}: model must be a language model, got {config.model_type}: give a script "
            "instead"
        )
    config, as_dtype = startable(config), getattr(torch, dtype)
    with torch.device("meta"):
        parameters = list(cls._from_config(config, dtype=as_dtype).parameters())
    _check_room(name, sum(p.nbytes for p in parameters) * copies, caller)
    return cls._from_config(config, dtype=as_dtype).train()


def _check_room(name: str, needed: int, caller: str) -> None:
    """Raises ValueError if memory is short: Linux would end the process without a message."""
    if needed > (free := available_memory()):
        raise ValueError(
            f"{caller}: model must fit into the {free / 1e9:.1f} GB that are free, got {name}, "
            f"which needs {needed / 1e9:.1f} GB without activations: give a smaller config.json; "
            "`fusedops memory` predicts what one needs"
        )
