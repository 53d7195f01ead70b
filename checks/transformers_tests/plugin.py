"""A pytest plugin that records outcomes and patches the models that tests create.

`--outcomes FILE` names the output file. With `--patch-models`, every transformers model is patched
when its constructor ends or, if it has no memory yet, when `from_pretrained` has loaded it. Both
kinds of run draw the same random numbers.
"""

import functools
import json
import random
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

RANK = {"passed": 0, "skipped": 1, "failed": 2}


class Patching:
    """Patches models as they are created. models: their count. sites: fused sites by kind."""

    def __init__(self) -> None:
        self.models, self.sites = 0, Counter[str]()
        self._base: type = object
        self._seen: WeakSet[Any] = WeakSet()
        self._making = threading.local()  # number of running constructors

    def install(self, base: Any) -> None:
        """Wraps the constructors, `train` and `to` of transformers' PreTrainedModel."""
        self._base, patching, wrapped = base, self, set[type]()

        def __new__(cls, *_: Any, **__: Any) -> Any:
            if cls not in wrapped:
                wrapped.add(cls)
                cls.__init__ = patching._constructor(cls.__init__)
            return object.__new__(cls)

        base.__new__ = __new__
        for name in ("train", "to"):
            setattr(base, name, self._method(getattr(base, name)))

    def _constructor(self, init: Any) -> Any:
        @functools.wraps(init)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            depth = self._depth()
            self._making.depth = depth + 1
            try:
                init(model, *args, **kwargs)
            finally:
                self._making.depth = depth
            self.patch(model)

        return __init__

    def _method(self, method: Any) -> Any:
        @functools.wraps(method)
        def first_patched(model: Any, *args: Any, **kwargs: Any) -> Any:
            self.patch(model)
            return method(model, *args, **kwargs)

        return first_patched

    def _depth(self) -> int:
        return getattr(self._making, "depth", 0)

    def patch(self, model: Any) -> None:
        """Patches a model once, unless it is part of one still under construction."""
        if self._depth() or model in self._seen or any(p.is_meta for p in model.parameters()):
            return
        import fusedops

        self._making.depth = 1  # models that patch itself creates stay unpatched
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = fusedops.patch(model)
        finally:
            self._making.depth = 0
        self._seen.update(m for m in model.modules() if isinstance(m, self._base))
        self.models += bool(report.fused)
        self.sites.update(site.kind for site in report.fused)


class Outcomes:
    """Each test's outcome, its subtests' counts by outcome, and the worst one's message."""

    def __init__(self, file: Path, patching: Patching | None) -> None:
        self.file, self.patching = file, patching
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_setup(self) -> None:
        import numpy
        import torch

        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.lstrip(":")
        outcome = self.found.setdefault(name, {"outcome": "passed", "subtests": {}, "said": ""})
        counts, is_subtest = outcome["subtests"], hasattr(report, "context")
        if is_subtest:
            counts[report.outcome] = counts.get(report.outcome, 0) + 1
        worse = RANK[report.outcome] > RANK[outcome["outcome"]]
        if worse and (report.failed or not is_subtest):
            outcome |= {"outcome": report.outcome, "said": _said(report)}

    def pytest_sessionfinish(self) -> None:
        said: dict[str, Any] = {"outcomes": self.found}
        if self.patching is not None:
            said |= {"models": self.patching.models, "sites": dict(self.patching.sites)}
        self.file.write_text(json.dumps(said, indent=1))


def _said(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # a skip's file, line and reason
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.partition("\n")[0] if crash else str(report.longrepr)[-200:]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True)
    parser.addoption("--patch-models", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    patching = None
    if config.getoption("--patch-models"):
        from transformers import PreTrainedModel

        patching = Patching()
        patching.install(PreTrainedModel)
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes"), patching))
