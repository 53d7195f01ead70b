"""The kinds of sites that patch knows: the argument, its default, the operators, a sentence."""

from typing import NamedTuple

__all__ = ["SITE_KINDS", "SITE_NAMES", "SiteKind", "only"]


class SiteKind(NamedTuple):
    """A kind of site. `name` is patch's argument and the kind in its report.

    default: the argument's default. family: the family whose operators run there. looks_for: what
    patch looks for, as docs/guides/patch.md says it.
    """

    name: str
    default: bool | None
    family: str
    looks_for: str


SITE_KINDS = (
    SiteKind(
        "norm",
        True,
        "norm",
        "a module that computes a LayerNorm or an RMSNorm, in any rounding that models use",
    ),
    SiteKind(
        "residual",
        True,
        "norm",
        "`h = a + b`, then a norm of `h` in the same forward, with or without dropout",
    ),
    SiteKind(
        "attention",
        True,
        "attention",
        "transformers' modules that look up their attention function in the config; calls of"
        " torch's `F.scaled_dot_product_attention`, and softmax attention that is written out",
    ),
    SiteKind(
        "mlp",
        True,
        "gated_activation",
        "`act(gate) * up`, of two tensors or two halves of one; the activation is SiLU or a GELU",
    ),
    SiteKind(
        "rotary",
        True,
        "rotary",
        "a call of a function that rotates halves or neighbours: of q, k, cos and sin, of one"
        " tensor (litgpt, nanochat, timm), or with a table of complex numbers or pairs (Llama's own"
        " code, gpt-fast)",
    ),
    SiteKind(
        "linear",
        True,
        "linear",
        "`nn.Linear` and transformers' `Conv1D`, if faster on this machine; a ReLU, GELU or SiLU"
        " that follows in the same code or `nn.Sequential`, as a call or as one written-out"
        " expression, is fused in",
    ),
    SiteKind(
        "experts",
        True,
        "experts",
        "transformers' modules that look up their experts function in the config, on CPUs",
    ),
    SiteKind(
        "loss",
        True,
        "cross_entropy",
        "a head, and one of transformers' own loss functions or a cross entropy in the same"
        " forward, in a forward with labels",
    ),
    SiteKind(
        "quantize",
        None,
        "quantized_linear",
        "linears and experts, which get quantized weights before the other kinds are fused",
    ),
)
# The kinds that patch fuses by default.
SITE_NAMES = tuple(kind.name for kind in SITE_KINDS if kind.default)


def only(*names: str) -> dict[str, bool]:
    """Returns patch's arguments that switch off all other kinds."""
    return {name: False for name in SITE_NAMES if name not in names}
