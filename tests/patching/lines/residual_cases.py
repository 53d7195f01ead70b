"""Layers that normalize a sum: forms that patch fuses, and forms that it must skip."""

import torch
from torch import nn
from torch.nn import functional as F

N = 32


class Layer(nn.Module):
    def __init__(self, p=0.25):
        super().__init__()
        self.norm, self.after = nn.LayerNorm(N), nn.LayerNorm(N)
        self.mix, self.up = nn.Linear(N, N), nn.Linear(N, N)
        self.dropout, self.p = nn.Dropout(p), p
        self.flag = True


class PreNorm(Layer):
    def forward(self, hidden):
        residual = hidden
        hidden = self.mix(self.norm(hidden))
        hidden = residual + hidden

        residual = hidden
        hidden = self.after(hidden)
        return residual + self.up(hidden)


class PostNorm(Layer):
    def forward(self, hidden):
        hidden = self.norm(self.mix(hidden) + hidden)
        return self.after(hidden + self.up(hidden))


class KeepsBoth(Layer):
    """The sum and its norm both stay in use, the norm inside another call."""

    def forward(self, hidden):
        total = self.mix(hidden) + hidden
        width = total.shape[-1]
        out = self.up(self.norm(total))
        return out * total / width


class Annotated(Layer):
    def forward(self, hidden):
        total: torch.Tensor = self.mix(hidden) + hidden
        return self.norm(total)


class ThreeTerms(Layer):
    def forward(self, hidden):
        hidden = self.mix(hidden) + self.up(hidden) + hidden * 0.5
        return self.norm(hidden)


class AcrossIf(Layer):
    """GPT-2's cross-attention."""

    def forward(self, hidden, other=None):
        residual = hidden
        hidden = self.mix(hidden)
        hidden = hidden + residual
        if other is not None:
            if other.shape != hidden.shape:
                raise ValueError("other has another shape")
            residual = hidden
            hidden = self.norm(hidden)
            hidden = residual + self.up(hidden) * other
        residual = hidden
        hidden = self.after(hidden)
        return residual + hidden


class NormInIf(Layer):
    """OPT: where the norm stands is a flag."""

    def forward(self, hidden):
        residual = hidden
        hidden = self.mix(hidden)
        hidden = F.dropout(hidden, p=self.p, training=self.training)
        hidden = residual + hidden
        if not self.flag:
            hidden = self.norm(hidden)
        return self.up(hidden)


class AfterIf(Layer):
    """An `if` that comes before the sum has nothing to do with it."""

    def forward(self, hidden):
        if self.flag:
            hidden = self.up(hidden)
        hidden = hidden + self.mix(hidden)
        hidden = self.norm(hidden)
        return hidden


class EarlyReturn(Layer):
    def forward(self, hidden, stop=False):
        hidden = self.mix(hidden) + hidden
        if stop:
            return hidden
        hidden = self.norm(hidden)
        return hidden


class InLoop(Layer):
    def forward(self, hidden):
        for _ in range(3):
            hidden = hidden + self.mix(hidden)
            hidden = self.norm(hidden)
        return hidden


class ModuleDropout(Layer):
    def forward(self, hidden):
        before = hidden
        hidden = self.mix(hidden)
        hidden = self.dropout(hidden)
        hidden = self.norm(hidden + before)
        return hidden


class InlineDropout(Layer):
    def forward(self, hidden):
        hidden = hidden + self.dropout(self.mix(hidden))
        return self.norm(hidden)


class FunctionalDropout(Layer):
    def forward(self, hidden):
        residual = hidden
        hidden = nn.functional.dropout(self.mix(hidden), p=self.p, training=self.training)
        hidden = residual + hidden
        return self.norm(hidden)


class TwoCalls(Layer):
    """Both terms are calls: they stay in their order, so the dropout stays where it is."""

    def forward(self, hidden):
        return self.norm(self.mix(hidden) + self.dropout(self.up(hidden)))


class DropoutStillNeeded(Layer):
    """The dropped tensor is used again, so its dropout has to stay where it is."""

    def forward(self, hidden):
        dropped = self.dropout(self.mix(hidden))
        total = self.norm(hidden + dropped)
        return total + dropped


DROPOUT = [NormInIf, ModuleDropout, InlineDropout, FunctionalDropout]
OTHERS = [KeepsBoth, Annotated, ThreeTerms, AfterIf, EarlyReturn, InLoop, TwoCalls]
FUSED = {
    PreNorm: ["after"],
    PostNorm: ["norm", "after"],
    AcrossIf: ["norm", "after", "after"],
    **{kind: ["norm"] for kind in [*OTHERS, *DROPOUT, DropoutStillNeeded]},
}


class InPlace(Layer):
    def forward(self, hidden):
        hidden = self.mix(hidden)
        hidden += self.up(hidden)
        return self.norm(hidden)


class UsedBetween(Layer):
    def forward(self, hidden):
        hidden = self.mix(hidden) + hidden
        scale = self.up(hidden)
        return self.norm(hidden) * scale


class Reshaped(Layer):
    def forward(self, hidden):
        hidden = self.mix(hidden) + hidden
        hidden = hidden.reshape(-1, N)
        return self.norm(hidden)


class InAnotherBlock(Layer):
    def forward(self, hidden):
        if self.flag:
            hidden = self.mix(hidden) + hidden
        return self.norm(hidden)


class StateInTest(Layer):
    """The `if` asks for what a statement before it changes."""

    def forward(self, hidden):
        state = {}
        hidden = hidden + self.mix(hidden)
        state["n"] = 1
        if "n" in state:
            hidden = self.norm(hidden)
        return hidden


class Cache:
    n = 0


class Counts(nn.Linear):
    def forward(self, hidden, cache):
        cache.n += 1
        return super().forward(hidden)


class CacheInTest(Layer):
    """The `if` asks for what a term of the sum changes."""

    def __init__(self):
        super().__init__()
        self.mix = Counts(N, N)

    def forward(self, hidden):
        cache = Cache()
        hidden = hidden + self.mix(hidden, cache)
        if cache.n > 0:
            hidden = self.norm(hidden)
        return hidden


class ListInTest(Layer):
    """So here, and the test is nothing but a name."""

    def forward(self, hidden):
        seen = []
        hidden = hidden + self.note(self.mix(hidden), seen)
        if seen:
            hidden = self.norm(hidden)
        return hidden

    def note(self, hidden, seen):
        seen.append(1)
        return hidden


class FlagChangedInSum(Layer):
    def forward(self, hidden):
        self.flag = False
        hidden = hidden + self.raise_flag(hidden)
        if self.flag:
            hidden = self.norm(hidden)
        return hidden

    def raise_flag(self, hidden):
        self.flag = True
        return hidden


SWITCH = False


class GlobalInTest(Layer):
    def forward(self, hidden):
        hidden = hidden + self.switch(hidden)
        if SWITCH:
            hidden = self.norm(hidden)
        return hidden

    def switch(self, hidden):
        global SWITCH
        SWITCH = True
        return hidden


class TorchAdd(Layer):
    def forward(self, hidden):
        hidden = torch.add(self.mix(hidden), hidden)
        return self.norm(hidden)


class Cast(Layer):
    def forward(self, hidden):
        return self.norm((self.mix(hidden) + hidden).to(hidden.dtype))


class OnSelf(Layer):
    def forward(self, hidden):
        self.h = self.mix(hidden) + hidden
        return self.norm(self.h)


class InExpression(Layer):
    def forward(self, hidden):
        return self.norm(self.mix(hidden) + hidden) if self.flag else hidden


class ByKeyword(Layer):
    def forward(self, hidden):
        return self.norm(input=self.mix(hidden) + hidden)


class FlagMadeBetween(Layer):
    """The `if` asks for something that is made after the sum."""

    def forward(self, hidden):
        hidden = self.mix(hidden) + hidden
        flag = not self.training
        if flag:
            hidden = self.norm(hidden)
        return hidden


CONDITIONS = [StateInTest, CacheInTest, ListInTest, GlobalInTest, FlagChangedInSum, FlagMadeBetween]
FORMS = [TorchAdd, Cast, OnSelf, InExpression, ByKeyword]
LEFT = {
    **dict.fromkeys(CONDITIONS, "the condition of the `if`"),
    **dict.fromkeys(FORMS, "the sum or its norm call is written in an unsupported form"),
    **dict.fromkeys([UsedBetween, Reshaped], "is used between the sum and the norm"),
    InPlace: "the sum is computed in place",
    InAnotherBlock: "not in the same block",
}


def build(kind, **kwargs):
    torch.manual_seed(0)
    return nn.Sequential(kind(**kwargs))


def close(got, expected, dtype=torch.float32):
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours - theirs).norm() <= 8 * torch.finfo(dtype).eps * theirs.norm()


def residual_sites(sites):
    return [site for site in sites if site.kind == "residual"]
