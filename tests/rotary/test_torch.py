"""rotary_embedding against transformers' functions, in autocast and with mixed dtypes."""

import importlib

import torch
from axes import grid

from fusedops.functional import rotary_embedding
from fusedops.references.rotary import rotary_embedding_reference
from fusedops.testing import yardstick
from rotary.cases import FLOATS, inputs

# Model: whether its pairs are neighbours, and whether its results go back to q's dtype.
MODELS = {
    "llama": (False, False),
    "gpt_neox": (False, False),
    "phi3": (False, False),
    "modernbert": (False, True),
    "cohere": (True, True),
}


@grid(model=MODELS, dtype=FLOATS, table=FLOATS, dim=[1, 2])
def test_as_transformers(model, dtype, table, dim):
    interleaved, back = MODELS[model]
    theirs = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    args = inputs((4, 2), 6, 32, 20 if model in ("gpt_neox", "phi3") else 32, dtype, table=table)
    args = [x.transpose(1, 2) if i < 2 and dim == 2 else x for i, x in enumerate(args)]

    def run(args):
        return theirs.apply_rotary_pos_emb(*args, unsqueeze_dim=dim)

    def ours(args):
        rotated = rotary_embedding(*args, unsqueeze_dim=dim, interleaved=interleaved)
        return [y.to(args[0].dtype) for y in rotated] if back else rotated

    eager = run(args)
    exact = rotary_embedding_reference(
        *(a.double() for a in args), unsqueeze_dim=dim, interleaved=interleaved
    )
    for rotated, expected, wide in zip(ours(args), eager, exact, strict=True):
        assert rotated.dtype == expected.dtype and rotated.shape == expected.shape
        assert yardstick(rotated, expected, wide) is None


@grid(
    dtype=[torch.float32, torch.bfloat16],
    table=[torch.float32, torch.bfloat16],
    rotary=[32, 20],
    device=["cpu", "cuda"],
)
def test_autocast_as_transformers_lines(dtype, table, rotary, device):
    args = inputs((3, 2), 5, 32, rotary, dtype, table=table)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast(device, torch.bfloat16):
        rotated = rotary_embedding(*args)
        composite = rotary_embedding(*args[:2], args[2].requires_grad_(), args[3])
        expected = rotary_embedding_reference(*args)
    for ours in (rotated, composite):
        assert [y.dtype for y in ours] == [y.dtype for y in expected]
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.04)


def test_gradients_have_the_dtypes_of_their_tensors():
    q, k, cos, sin = inputs((3, 2), 5, 32, dtype=torch.bfloat16, table=torch.float32)
    leaves = q.requires_grad_(), k.requires_grad_()
    rotated = rotary_embedding(*leaves, cos, sin)
    grads = torch.autograd.grad(sum(y.sum() for y in rotated), leaves)
    assert {y.dtype for y in rotated} == {torch.float32}
    assert {g.dtype for g in grads} == {torch.bfloat16}


def test_a_gradient_beside_the_tables_is_rounded_once():
    """A table with a gradient has ATen calls run, in float32."""
    q, k, cos, sin = inputs((3, 2), 50, 32, dtype=torch.bfloat16, table=torch.float32)
    dy = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))

    def gradient(run, to):
        leaf, table = q.to(to).requires_grad_(), cos.clone().requires_grad_()
        y = run(leaf, k.to(to), table, sin)[0]
        return torch.autograd.grad(y, leaf, dy.to(y))[0]

    exact = gradient(rotary_embedding_reference, torch.float64).bfloat16()
    assert (gradient(rotary_embedding, torch.bfloat16) == exact).float().mean() > 0.99
