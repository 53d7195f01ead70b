"""Attention that is written out stays as it is where other code sees its scores."""

import math

import torch
from axes import grid

from fusedops.patching import patch
from fusedops.patching.core.kinds import only
from patching.lines.attention_cases import LENGTH, Projected, attention_rows, inputs
from patching.quiet import quietly

ALONE = only("attention")


class Returned(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights


class Stored(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        weights = (q @ k.mT).softmax(-1)
        self.weights = weights
        return weights @ v


class Multiplied(Projected):
    """Heads are weighed after the softmax."""

    def forward(self, x):
        q, k, v = self.operands(x)
        weights = (q @ k.mT).softmax(-1) * 2
        return weights @ v


class Unknown(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        scores = torch.relu(q @ k.mT)
        return scores.softmax(-1) @ v


class Indexed(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        scores = q @ k.mT
        scores[:, :, :, 3] = -math.inf
        return scores.softmax(-1) @ v


class ChangedBetween(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        q = q * 1
        scores = q @ k.mT
        q.mul_(2)
        return scores.softmax(-1) @ v


class Aliased(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        scores = q @ k.mT
        masked = scores.masked_fill_(
            torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -math.inf
        )
        return (masked.softmax(-1) @ v) + (scores.softmax(-1) @ v)


class Looped(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        for _ in range(2):
            q = (q @ k.mT).softmax(-1) @ v
        return q


class AcrossContexts(Projected):
    """The product runs without autocast, what follows with it."""

    def forward(self, x):
        q, k, v = self.operands(x)
        with torch.autocast("cpu", enabled=False):
            scores = q.float() @ k.float().mT
        return scores.softmax(-1).to(v.dtype) @ v


class EntersContext(Projected):
    """The product runs with autocast, what follows without it."""

    def forward(self, x):
        q, k, v = self.operands(x)
        scores = q @ k.mT
        with torch.autocast("cpu", enabled=False):
            weights = scores.float().softmax(-1)
            return weights @ v.float()


class Nonlocal(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        scores = q @ k.mT
        weights = (lambda: scores.softmax(-1))()
        return weights @ v


def in_place(scores):
    scores *= 2
    return scores


class ChangedByAFunction(Projected):
    def forward(self, x):
        q, k, v = self.operands(x)
        scores = q @ k.mT
        weights = in_place(scores).softmax(-1)
        return weights @ v + scores.softmax(-1) @ v


REFUSED = {
    Returned: "`(weights @ v, weights)` uses its weights",
    Stored: "`self.weights = weights` uses its weights",
    Multiplied: "uses its weights",
    Unknown: "`torch.relu(q @ k.mT)` uses its scores",
    Indexed: "uses its scores",
    ChangedBetween: "may change one of its tensors in place",
    Aliased: "uses its scores",
    Looped: "begins a form that is not read",
    AcrossContexts: "outside of the block that makes them",
    EntersContext: "outside of the block that makes them",
    Nonlocal: "uses its weights",
    ChangedByAFunction: "uses its scores",
}


@grid(cls=REFUSED)
def test_scores_that_other_code_sees_stay_written(cls):
    model, x = cls(), inputs()
    expected = model(x)
    report = quietly(patch, model, **ALONE)
    assert type(model) is cls and not report.fused and not report.skipped
    rows = attention_rows(report.kept)
    assert len(rows) == 1 and REFUSED[cls] in rows[0].reason
    assert rows[0].was.startswith("softmax attention written out, test_attention_refused.py:")
    for got, want in zip(model(x), expected, strict=True):
        assert torch.equal(got, want)
