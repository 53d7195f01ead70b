"""Checks that the transformers APIs that patch relies on still exist.

No version is pinned: a newer transformers works as long as these names exist and take these
arguments. If one is missing, the sites of its kind are skipped, and the report names it.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["RELIANCES", "Reliance", "missing_api"]


@dataclass(frozen=True)
class Reliance:
    """A name in transformers that one kind of site needs.

    has: attributes of a class or table; of an instance of the class, if `instantiate`. takes:
    parameters of a function, those that we pass or are passed by name.
    """

    kind: str
    name: str
    has: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    instantiate: bool = False


RELIANCES = (
    # Models and configs are recognised by their bases. A config has a property that names the
    # attention, which a view overrides, and says whether attention weights are needed.
    Reliance("attention", "modeling_utils.PreTrainedModel"),
    Reliance(
        "attention",
        "configuration_utils.PreTrainedConfig",
        has=("_attn_implementation", "_attn_implementation_internal", "_output_attentions"),
        instantiate=True,
    ),
    # A function is registered in two tables: of functions, and of their mask builders.
    Reliance("attention", "modeling_utils.AttentionInterface", has=("register",)),
    Reliance("attention", "modeling_utils.ALL_ATTENTION_FUNCTIONS", has=("get",)),
    Reliance("attention", "masking_utils.AttentionMaskInterface", has=("register",)),
    Reliance("attention", "masking_utils.sdpa_mask"),
    # The function that runs for sdpa; ours is called with the same arguments.
    Reliance(
        "attention",
        "integrations.sdpa_attention.sdpa_attention_forward",
        takes=(
            *("module", "query", "key", "value", "attention_mask", "dropout", "scaling"),
            *("is_causal", "position_bias"),
        ),
    ),
    # An experts module looks up its function by a name in its config.
    Reliance(
        "experts",
        "configuration_utils.PreTrainedConfig",
        has=("_experts_implementation", "_experts_implementation_internal"),
        instantiate=True,
    ),
    Reliance("experts", "integrations.moe.ExpertsInterface", has=("register",)),
    Reliance("experts", "integrations.moe.ALL_EXPERTS_FUNCTIONS", has=("get_interface",)),
    Reliance(
        "experts",
        "integrations.moe.grouped_mm_experts_forward",
        takes=("hidden_states", "top_k_index", "top_k_weights"),
    ),
    # A model's loss function is a property that a subclass overrides.
    Reliance("loss", "modeling_utils.PreTrainedModel", has=("loss_function",)),
    Reliance(
        "loss",
        "loss.loss_utils.ForCausalLMLoss",
        takes=("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index"),
    ),
)


def missing_api(kind: str) -> str:
    """Why sites of this kind are skipped: which transformers API is missing.

    Empty if nothing is missing, or if transformers is not loaded: then no model is one of its
    models.
    """
    home = sys.modules.get("transformers")
    if home is None:
        return ""
    version = getattr(home, "__version__", "(unknown version)")
    gone = next((what for r in RELIANCES if r.kind == kind for what in _missing(r)), "")
    return f"transformers {version} has no {gone}, which patch relies on" if gone else ""


def _missing(reliance: Reliance) -> Iterator[str]:
    """Yields the missing parts of a reliance."""
    value = _found(reliance.name)
    if value is None:
        yield reliance.name
        return
    value = value() if reliance.instantiate else value
    yield from (f"{reliance.name}.{name}" for name in reliance.has if not hasattr(value, name))
    if reliance.takes:
        accepted = inspect.signature(value).parameters
        yield from (f"{name} in {reliance.name}" for name in reliance.takes if name not in accepted)


def _found(name: str) -> Any:
    place, _, last = f"transformers.{name}".rpartition(".")
    try:
        return getattr(importlib.import_module(place), last, None)
    except ImportError:
        return None
