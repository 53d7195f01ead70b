"""FusedState: the data that patch stores in a fused module's class, as the attribute `_fusedops`.

A fused class holds its `FusedState` as the class attribute `_fusedops`, which all modules of the
class share. Nothing of it is in a state dict or in a pickle.

If another library has put a class of its own on top of the fused one, unpatch cannot restore the
original class. It then stores `state.off` in the instance, which hides the class's state.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from torch import nn

__all__ = ["ATTRIBUTE", "FusedState"]

ATTRIBUTE = "_fusedops"


@dataclass(eq=False)  # not frozen: torch.compile would guard every field where one is read
class FusedState:
    """What patch knows about a fused class. Fields with a site's data are empty for other sites.

    Set and read by `core/swap.py`:

    original: the class before patch.
    forward: the fused class's forward. A class on top may have another; then nothing is active.
    over: makes the class for a loss or a head from (original, the fused class below or None). Later
        swaps call it again, on the new class below.
    below: that fused class below, None without one.

    Set by `modules/norm/site.py`:

    recipe: how the fused function replaces a norm's. Read to find the sums that may be fused too.
    regimes: the recipe's. Read in each call; empty if switched off.
    add: (module, x, residual, dropout_p) -> (the sum's norm, the sum), or None. Called by
        `lines/residual`.
    why: (module, x, adds) -> why the norm of x, a sum if `adds`, runs its original; else empty.

    Set and read, in each call, by the file named; None if switched off:

    activation: what an activation module computes (`modules/activation.py`). Its forward is the
        original's.
    form: how a linear's operands are read (`modules/linear.py`).
    head: the same for a head whose logits may wait (`models/loss/head.py`).
    loss: the loss function that replaces a model's own (`models/loss/site.py`).

    Set by `lines/layer.py`:

    kinds: the kinds of sites that a rewritten forward contains. Read when it is patched again.
    lines: the names of the fused sites in that forward. Read in each call; empty if switched off.
    """

    original: type[nn.Module]
    forward: Callable | None = None
    over: Callable[[type[nn.Module], Any], type] | None = None
    below: type | None = None

    recipe: Any = None
    regimes: frozenset = frozenset()
    add: Callable | None = None
    why: Callable | None = None

    activation: Any = None
    form: Any = None
    head: Any = None
    loss: Any = None

    kinds: tuple = ()
    lines: frozenset[str] = frozenset()

    @property
    def is_on(self) -> bool:
        """Whether any fused function may run."""
        sites = self.regimes, self.activation, self.form, self.head, self.loss, self.lines
        return any(sites)

    @cached_property
    def off(self) -> "FusedState":
        """The same with every fused function switched off."""
        whole = replace(self, regimes=frozenset(), lines=frozenset())
        return replace(whole, activation=None, form=None, head=None, loss=None)

    def sites(self) -> dict[str, Any]:
        """The fields that a class on top of this one takes over."""
        names = {field.name for field in fields(self)} - {"original", "forward", "over"}
        return {name: getattr(self, name) for name in names}

    def __deepcopy__(self, memo: dict) -> "FusedState":
        return self

    def __reduce__(self) -> tuple:
        """Pickled as None, so that the file loads without fusedops."""
        return type(None), ()
