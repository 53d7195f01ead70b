"""What patch relies on in transformers, in one place, and whether it is there.

No version is pinned: a newer one works for as long as these names are where they are and take what
they take. Where one has moved, the sites of its kind are left, and the report says which.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusedops.patching.core.introspection import MISSING

__all__ = ["RELIANCES", "Reliance", "moved"]


@dataclass(frozen=True)
class Reliance:
    """A name in transformers that a kind of site needs.

    has: the attributes of a class, of an instance that is made where `made`, or of a table.
    takes: the parameters of a function, those that we pass or are passed by name.
    """

    kind: str
    name: str
    has: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    made: bool = False


RELIANCES = (
    # Models and configs are known by their bases. A config names the attention in a property, of
    # which a view has another, and says whether weights are wanted.
    Reliance("attention", "modeling_utils.PreTrainedModel"),
    Reliance(
        "attention",
        "configuration_utils.PreTrainedConfig",
        has=("_attn_implementation", "_attn_implementation_internal", "_output_attentions"),
        made=True,
    ),
    # A function is entered in two tables, of functions and of what makes their masks.
    Reliance("attention", "modeling_utils.AttentionInterface", has=("register",)),
    Reliance("attention", "modeling_utils.ALL_ATTENTION_FUNCTIONS", has=("get",)),
    Reliance("attention", "masking_utils.AttentionMaskInterface", has=("register",)),
    Reliance("attention", "masking_utils.sdpa_mask"),
    # What runs where sdpa is set, and what ours is called with.
    Reliance(
        "attention",
        "integrations.sdpa_attention.sdpa_attention_forward",
        takes=(
            *("module", "query", "key", "value", "attention_mask", "dropout", "scaling"),
            *("is_causal", "position_bias"),
        ),
    ),
    # A model's loss is a property, which a subclass overrides; its functions are known by module.
    Reliance("loss", "modeling_utils.PreTrainedModel", has=("loss_function",)),
    Reliance(
        "loss",
        "loss.loss_utils.ForCausalLMLoss",
        takes=("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index"),
    ),
)


def moved(kind: str) -> str:
    """The reason to leave the sites of a kind: what of transformers is not where it was.

    Empty where all is there, and where transformers is not loaded: then no model is one of its.
    """
    home = sys.modules.get("transformers")
    if home is None:
        return ""
    version = getattr(home, "__version__", "(unknown version)")
    gone = next((what for r in RELIANCES if r.kind == kind for what in _gone(r)), "")
    return f"transformers {version} has no {gone}, which patch relies on" if gone else ""


def _gone(reliance: Reliance) -> Iterator[str]:
    """What of it is not there."""
    value = _found(reliance.name)
    if value is MISSING:
        yield reliance.name
        return
    value = value() if reliance.made else value
    yield from (f"{reliance.name}.{name}" for name in reliance.has if not hasattr(value, name))
    if reliance.takes:
        known = inspect.signature(value).parameters
        yield from (f"{name} in {reliance.name}" for name in reliance.takes if name not in known)


def _found(name: str) -> Any:
    place, _, last = f"transformers.{name}".rpartition(".")
    try:
        return getattr(importlib.import_module(place), last, MISSING)
    except ImportError:
        return MISSING
