"""MLP modules with gated activations that patch fuses, and variants that it must skip."""

import types

import torch
from torch import nn
from torch.nn import functional as F

N = 48


class MLP(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(N, N), nn.Linear(N, N)
        self.gate_up, self.down_proj = nn.Linear(N, 2 * N), nn.Linear(N, N)
        self.act_fn = act or nn.SiLU()
        self.dropout = nn.Dropout(0.0)


class Llama(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Turned(MLP):
    def forward(self, x):
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))


class Named(MLP):
    """T5: the product is of names, a dropout follows."""

    def forward(self, x):
        activated = self.act_fn(self.gate_proj(x))
        linear = self.up_proj(x)
        x = activated * linear
        return self.down_proj(self.dropout(x))


class Packed(MLP):
    """Phi-3: the second half is overwritten by the product."""

    def forward(self, x):
        up = self.gate_up(x)
        gate, up = up.chunk(2, dim=-1)
        up = up * self.act_fn(gate)
        return self.down_proj(up)


class PackedCall(MLP):
    """ModernBERT: what is split is a call."""

    def forward(self, x):
        first, second = self.gate_up(x).chunk(2, -1)
        return self.down_proj(self.dropout(self.act_fn(first) * second))


class UpFirst(MLP):
    """The up half comes first, which no packed function reads."""

    def forward(self, x):
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class SplitRows(MLP):
    """Halves of the rows, not of each row, which no packed function reads."""

    def forward(self, x):
        gate, up = self.gate_proj(torch.cat([x, x - 1])).chunk(2, dim=0)
        return self.down_proj(self.act_fn(gate) * up)


class UsedAgain(MLP):
    """A half is used once more, so it has to be there."""

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y = self.act_fn(gate) * up
        return self.down_proj(y) + up


class Functional(MLP):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class InBranch(MLP):
    def forward(self, x):
        if self.training:
            y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        else:
            y = self.up_proj(x) * self.act_fn(self.gate_proj(x))
        return self.down_proj(y)


FUSED = [
    *(Llama, Turned, Named, Packed, PackedCall, UpFirst, SplitRows, UsedAgain, Functional),
    InBranch,
]


class ActivatedTwice(MLP):
    """The activated gate is used outside the product."""

    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x)) + gate


class Changed(MLP):
    """The activated tensor is not fresh: it may change before the product."""

    def forward(self, x):
        gate = self.act_fn(x)
        x = x.mul_(2)
        return self.down_proj(gate * self.up_proj(x))


class ChangedByUp(MLP):
    """The up half changes the gate, which was activated before."""

    def forward(self, x):
        x = x * 1
        return self.down_proj(self.act_fn(x) * x.mul_(2))


class ChangedBetween(MLP):
    """The dropout may return x itself, which changes before the product."""

    def forward(self, x):
        x = x * 1
        gate = self.act_fn(self.dropout(x))
        x += 1
        return self.down_proj(gate * self.up_proj(x))


class Local(MLP):
    """A local name hides the function."""

    def forward(self, x):
        F = types.SimpleNamespace(silu=torch.relu)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class InPlace(MLP):
    """The activation works in place."""

    def __init__(self, act=None):
        super().__init__(nn.SiLU(inplace=True))

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ByParameter(MLP):
    """The other factor is no up projection."""

    def __init__(self, act=None):
        super().__init__(act)
        self.scale = nn.Parameter(torch.ones(N))

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.scale)


class Scaled(MLP):
    """The other factor is a number."""

    def forward(self, x):
        return self.down_proj(0.5 * self.act_fn(self.gate_proj(x)))


class Added(MLP):
    """The product is added to the gate, which is so read again."""

    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x))
        gate += gate * self.up_proj(x)
        return self.down_proj(gate)


class AddedToHalf(MLP):
    """This one is fused, of halves that stay."""

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        up = up * 1
        up += self.act_fn(gate) * up
        return self.down_proj(up)


class InnerName(MLP):
    """Another thing of the same name in an inner scope."""

    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x))
        gate = sum(gate * self.up_proj(x) for gate in [gate, gate])
        return self.down_proj(gate)


class Finally(MLP):
    """A handler sees a half-done statement."""

    def forward(self, x):
        try:
            gate = self.act_fn(self.gate_proj(x))
            return self.down_proj(gate * self.up_proj(x))
        finally:
            self.last = gate.detach()


class ClipBetween(MLP):
    """A module that works in place runs in between."""

    def __init__(self, act=None):
        super().__init__(act)
        self.clip = nn.Hardtanh(-0.1, 0.1, inplace=True)

    def forward(self, x):
        x = x * 1
        gate = self.act_fn(self.dropout(x))
        return self.down_proj(gate * self.up_proj(self.clip(x)))


LEFT = [ActivatedTwice, ByParameter, InPlace, Local, InnerName, Scaled]
CHANGED = [Added, AddedToHalf, Changed, ChangedByUp, ChangedBetween, ClipBetween, Finally]
