"""The memory planner's meta tensors: numbers that a model reads while it is planned."""

import numpy
import pytest
import torch
from torch import nn

import fusedops
from fusedops.profiling.planning.meta import Tracker, tracked

# Numbers that are known


class Reads(nn.Module):
    """Appends what it reads of its ids and of its own tensors to a list, which copies share."""

    def __init__(self, read, results):
        super().__init__()
        self.read = lambda *given: results.append(read(*given))
        self.embedding = nn.Embedding(16, 4)
        self.register_buffer("places", torch.arange(3), persistent=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.plain = torch.tensor([2, 1])
        self.plain_list = [torch.tensor(3)]

    def forward(self, input_ids):
        self.read(self, input_ids)
        return self.embedding(input_ids)


def written(m, ids):
    ids[[0, 1], [2, 3]] = 7
    ids[torch.tensor([True, False])] += torch.tensor(1)
    ids[tuple(m.places[:2]), (0, 1)] += 2
    ids.view(-1)[-1] = 5
    return ids.tolist()


def like(w):
    results = torch.zeros_like(w), torch.ones_like(w, dtype=torch.bool), torch.full_like(w, 3)
    results += w.new_zeros(2), w.new_ones(2), w.new_full((2,), 7)
    return [t.tolist() for t in results]


READS = {
    "a tensor of numbers": lambda m, ids: bool((torch.tensor([0, 1]) == 0).any()),
    "the place of an id": lambda m, ids: 0 in ids[:, [-1, 0]],
    "a list of masks": lambda m, ids: ids[[True, False]].tolist(),
    "an empty list": lambda m, ids: [*ids[[]].shape],
    "nested lists": lambda m, ids: ids[[[0, 1], [1, 0]], :1].tolist(),
    "another device": lambda m, ids: torch.tensor([1, 2]).to(ids.device).sum().item(),
    "numbers like others": lambda m, ids: ids.new_tensor([4, 5]).tolist(),
    "tensors of tensors": lambda m, ids: torch.tensor([ids[0, 0], m.places[1]]).tolist(),
    "an array": lambda m, ids: torch.as_tensor(numpy.arange(3), device=ids.device).tolist(),
    "an array on the CPU": lambda m, ids: torch.from_numpy(numpy.arange(3)).add_(1).tolist(),
    "a copy to the CPU": lambda m, ids: int(ids.cpu().numpy().sum()),
    "a copy into the CPU": lambda m, ids: torch.ones(3, device="cpu").copy_(m.places).tolist(),
    "buffers": lambda m, ids: (m.places.tolist(), m.scale.tolist(), m.plain.tolist()),
    "a list's tensor": lambda m, ids: int(m.plain_list[0]),
    "positions": lambda m, ids: torch.nonzero(ids == 0).tolist(),
    "masked": lambda m, ids: (ids[ids == 0].tolist(), ids.masked_select(ids == 1).tolist()),
    "a known mask of weights": lambda m, ids: [*m.embedding.weight[:3][m.places == 1].shape],
    "counts": lambda m, ids: (ids.unique().tolist(), ids.view(-1).bincount().tolist()),
    "repeats": lambda m, ids: torch.repeat_interleave(m.places).tolist(),
    "equal": lambda m, ids: torch.equal(ids, ids.clone()),
    "written": written,
    "filled": lambda m, ids: torch.empty(3).fill_(2).tolist(),
    "through .data": lambda m, ids: (s := torch.zeros(2), s.data.add_(1), s.tolist())[-1],
    "foreach": lambda m, ids: (s := [torch.zeros(2)], torch._foreach_add_(s, 1), s[0].tolist())[-1],
    "like a weight": lambda m, ids: like(m.embedding.weight[0]),
    "known infinities": lambda m, ids: [
        t.tolist()
        for x in (m.scale / 0, m.scale - torch.inf, (m.places[:2] / 0).sqrt())
        for t in (x.isinf(), x.isnan(), x.isfinite())
    ],
    "an assertion": lambda m, ids: torch._check_tensor_all(m.embedding.weight < 99),
    "finite": lambda m, ids: bool(m.embedding.weight.isfinite().all()),
    "infinite": lambda m, ids: bool(
        (torch.isinf(m.embedding.weight) | m.scale.isnan().any()).any()
    ),
    "complex": lambda m, ids: torch.tensor([1 + 2j]).conj().imag.tolist(),
}


@pytest.mark.parametrize("name", READS)
def test_a_model_reads_known_numbers(name):
    """Planned as with real tensors; the model that is given stays as it is."""
    results = []
    module = Reads(READS[name], results)
    fusedops.memory(module, batch=2, length=5)
    module(torch.zeros(2, 5, dtype=torch.int64))
    planned, real = results
    assert planned == real


def tensors_of_weights(m, ids):
    kept = torch.zeros(4)
    view = kept[1:]
    view.copy_(m.embedding.weight[0, 1:])
    return kept.tolist()


UNKNOWN = {
    "a weight": lambda m, ids: m.embedding.weight.sum().item(),
    "a copy of a weight": lambda m, ids: m.embedding.weight.detach().cpu(),
    "a mask of weights": lambda m, ids: ids[:, :4][m.embedding.weight[:2] > 0],
    "positions of weights": lambda m, ids: m.embedding.weight.nonzero(),
    "a view that weights were written to": tensors_of_weights,
    "unwritten": lambda m, ids: torch.empty(3).tolist(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_model_that_reads_unknown_numbers_is_named(name):
    """With the operator, the shapes and the model's line."""
    message = r"which raised RuntimeError: aten\..* needs the numbers of (float32|bool|int64) \[.*"
    with pytest.raises(RuntimeError, match=f"got Reads, {message} .at test_meta.py:"):
        fusedops.memory(Reads(UNKNOWN[name], []), batch=2, length=5)


def test_the_first_rank_has_the_most_rows():
    layer = nn.Linear(8, 10, bias=False)
    batch = {"input": torch.empty(2, 8)}
    plan = fusedops.memory(layer, batch=batch, mode="forward", world=4, strategy="fsdp")
    assert plan.parameters == 3 * 8 * 4


def test_strides_are_those_of_this_call():
    """Shapes that operators returned are remembered, for tensors of the same strides."""
    with tracked(Tracker()):
        for x in (torch.empty(3, 4), torch.empty(4, 3).t()):
            assert (x + 1).stride() == x.stride()


def test_numbers_of_a_module_in_another_dtype():
    results = []
    module = Reads(lambda m, ids: (m.scale.dtype, m.scale.tolist()), results)
    fusedops.memory(module, batch=2, length=5, dtype="bfloat16")
    assert results == [(torch.bfloat16, [0.5, 2.0])]
    assert module.scale.dtype == torch.float32


def test_a_batch_of_tensors():
    """Their numbers are known, on the CPU or on meta their bytes are inputs."""
    results = []
    module = Reads(lambda m, ids: ids.tolist(), results)
    ids = torch.tensor([[1, 2, 3]])
    plan = fusedops.memory(module, batch={"input_ids": ids})
    assert results == [[[1, 2, 3]]] and plan.inputs == 3 * 8
    assert plan.title.startswith("Reads, 64 parameters (float32), batch input_ids 1 x 3, train")
    other = Reads(lambda m, ids: 0, [])
    assert fusedops.memory(other, batch={"input_ids": ids.to("meta")}).inputs == plan.inputs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": {}}, r"batch must have tensors, got \[\]"),
        ({"batch": {"input_ids": 3}}, r"batch must have tensors, got \['input_ids'\]"),
        ({"batch": {"x": torch.ones(2)}, "length": 2}, "length must be None if batch is a dict"),
        ({"batch": 2}, "length must be an integer of at least 1, got None"),
        ({"batch": {"x": torch.ones(2)}, "mode": "generate"}, "mode 'generate' needs batch and le"),
    ],
)
def test_bad_batches(given, message):
    with pytest.raises((TypeError, ValueError), match=f"^memory: {message}"):
        fusedops.memory("llama", **given)
