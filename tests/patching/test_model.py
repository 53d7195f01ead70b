"""Patched models train, generate, pickle, copy and compile, and unpatch restores them."""

import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch
from axes import grid
from torch import nn

from fusedops.patching import PatchReport, Site, patch, patched, unpatch
from fusedops.patching.lines.residual import site as residual
from patching.models.loss_cases import IDS, SIZES, llama

transformers = pytest.importorskip("transformers")


def bert():
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def llama_coverage(layers, adapters=0):
    """The coverage of a Llama of so many layers, and of the linears that LoRA has added to it."""
    linears = 7 * layers + 1 + adapters
    sites = {"norm": 2 * layers + 1, "residual": layers}
    sites |= dict.fromkeys(("mlp", "rotary", "attention"), layers)
    return {kind: (n, n) for kind, n in (sites | {"linear": linears, "loss": 1}).items()}


def classes(model):
    return [type(module) for module in model.modules()]


@pytest.fixture(autouse=True)
def everywhere(any_size):
    """Sites of any size are fused, on every machine."""


@pytest.fixture
def model():
    return llama()


def test_report(model):
    report = patch(model)
    assert report.coverage == llama_coverage(2)
    assert report.fused[0] == Site(
        "model.layers.0.input_layernorm", "norm", "LlamaRMSNorm", "rms_norm(rounding='llama')"
    )
    text = str(report)
    assert "model.layers.0-1.post_attention_layernorm" in text
    assert "LlamaAttention/sdpa" in text


def test_unpatch_gives_the_bits_and_the_classes_back(model):
    before, out = classes(model), model(IDS).logits
    patch(model)
    assert classes(model) != before
    unpatch(model)
    assert all(now is was for now, was in zip(classes(model), before, strict=True))
    assert torch.equal(model(IDS).logits, out)


def test_patching_twice_is_patching_once(model):
    first = patch(model)
    now = classes(model)
    assert patch(model) == first
    assert classes(model) == now
    unpatch(model)
    assert classes(model) == classes(llama())


def test_only_this_instance_is_patched(model):
    """Neither the classes, nor a model with the same config, nor one built later."""
    sibling = transformers.LlamaForCausalLM(model.config)
    before = classes(sibling)
    forward = type(model.model.norm).forward
    patch(model)
    assert classes(sibling) == classes(llama()) == before
    assert type(sibling.model.norm).forward is forward


def test_parameters_stay_the_same_objects_under_the_same_names(model):
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    patch(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is p for name, p in before.items())
    assert list(model.state_dict()) == keys


def test_classes_look_like_the_originals(model):
    before = [(c.__name__, c.__qualname__, c.__module__) for c in classes(model)]
    originals = classes(model)
    patch(model)
    assert [(c.__name__, c.__qualname__, c.__module__) for c in classes(model)] == before
    assert all(isinstance(m, c) for m, c in zip(model.modules(), originals, strict=True))


def test_pickle_and_torch_save_write_the_original_classes(model):
    before, out = classes(model), model(IDS).logits
    patch(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [pickle.loads(pickle.dumps(model, p)) for p in (2, pickle.HIGHEST_PROTOCOL)]
    for other in [*copies, torch.load(file, weights_only=False)]:
        assert classes(other) == before
        assert torch.equal(other(IDS).logits, out)


def test_deepcopy_stays_patched(model):
    patch(model)
    other = copy.deepcopy(model)
    assert classes(other) == classes(model)
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    assert other.model.norm.weight is not model.model.norm.weight
    unpatch(other)
    assert classes(other) == classes(llama())
    assert classes(model) != classes(llama())


def test_a_module_made_by_a_patched_modules_class_is_unfused(model):
    """No report would tell of a fused one. Nor of one without arguments, or below a user's."""
    patch(model)
    norm, act = model.model.norm, model.model.layers[0].mlp.act_fn
    for module in (type(norm)(32, eps=0.5), type(act)(), type(model)(model.config)):
        assert not any("_fusedops" in vars(type(m)) for m in module.modules())
        assert type(module).forward is not type(norm).forward
    assert type(norm)(32, eps=0.5).variance_epsilon == 0.5
    signature = inspect.signature(transformers.models.llama.modeling_llama.LlamaRMSNorm)
    assert inspect.signature(type(norm)) == signature

    class Users(type(norm)):
        pass

    assert type(Users(32)) is Users and Users(32).weight.shape == (32,)


def test_what_torch_copies_without_a_call_stays_patched(model):
    """nn.DataParallel makes its replicas this way."""
    patch(model)
    for module in (model, model.model.norm):
        assert type(module._replicate_for_data_parallel()) is type(module)


def test_save_pretrained(model, tmp_path):
    patch(model)
    model.save_pretrained(tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert classes(other) == classes(llama())
    patch(other)
    assert torch.equal(other(IDS).logits, model.eval()(IDS).logits)


def test_generate_and_hidden_states(model):
    model.eval()
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False)
    expected = model(IDS, output_hidden_states=True, output_attentions=True)
    patch(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), tokens)
    got = model(IDS, output_hidden_states=True, output_attentions=True)
    assert len(got.hidden_states) == len(expected.hidden_states) == 3
    torch.testing.assert_close(got.hidden_states, expected.hidden_states)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_goes_on_recomputing(model, reentrant):
    """Every layer runs twice; an instance-level forward would make that once."""
    expected = gradients(model)
    patch(model)
    checkpoint(model, reentrant)
    runs = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    torch.testing.assert_close(gradients(model), expected)
    assert len(runs) == 4


def checkpoint(model, reentrant):
    with warnings.catch_warnings():  # the method has another name in a later transformers
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()


def gradients(model):
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_dropout_again(reentrant):
    """The gradient of a checkpointed step equals that of the plain step from the same seed."""
    model = bert().train()
    patch(model)
    torch.manual_seed(5)
    expected = gradients(model)
    checkpoint(model, reentrant)
    torch.manual_seed(5)
    torch.testing.assert_close(gradients(model), expected)


def gemma3():
    """Norms queries and keys that lie permuted in memory."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=8, num_key_value_heads=2)
    return transformers.Gemma3ForCausalLM(config)


@grid("build,backend", [(llama, "aot_eager"), (bert, "eager"), (gemma3, "eager")])
def test_compile_in_one_graph(build, backend):
    model = build().eval()
    expected = model(IDS).logits
    patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(IDS).logits, expected)
    torch.testing.assert_close(compiled(IDS[:, :5]).logits, model(IDS[:, :5]).logits)
    torch._dynamo.reset()


def test_training_step_equals_the_unpatched_one(model):
    twin = copy.deepcopy(model)
    patch(model)
    losses = []
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            loss = each(IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)


def test_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(IDS, labels=IDS)
        patch(model)
        got = model(IDS, labels=IDS)
    assert got.logits.dtype == expected.logits.dtype
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-2, atol=0)


def test_meta_model_of_seven_billion():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    assert patch(model).coverage == llama_coverage(32)
    assert all(p.is_meta for p in model.parameters())


def test_context_manager(model):
    before, out = classes(model), model(IDS).logits
    with patched(model) as report:
        assert isinstance(report, PatchReport)
        assert classes(model) != before
    assert classes(model) == before
    with pytest.raises(KeyError), patched(model):
        raise KeyError
    assert classes(model) == before
    assert torch.equal(model(IDS).logits, out)


class OtherNorm(nn.Module):
    """A site that cannot be fused: neither a LayerNorm nor an RMSNorm."""

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)


def test_nothing_to_patch_warns_and_strict_raises():
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match="nothing was fused"):
        report = patch(model)
    assert report.coverage == {}
    with pytest.raises(RuntimeError, match="no site found"):
        patch(model, strict=True)


def test_strict_leaves_the_model_unpatched():
    model = nn.Sequential(nn.LayerNorm(4), OtherNorm())
    with pytest.raises(RuntimeError, match="OtherNorm"):
        patch(model, strict=True)
    assert type(model[0]) is nn.LayerNorm
    assert patch(llama(), strict=True).fused


def test_an_earlier_patch_outlives_one_that_fails_and_one_that_ends():
    model = nn.Sequential(nn.LayerNorm(4), OtherNorm())
    patch(model[0])
    now = classes(model)
    for options in ({}, {"verify": torch.randn(3, 4)}):
        with pytest.raises(RuntimeError, match="OtherNorm"):
            patch(model, strict=True, **options)
        assert classes(model) == now
    with pytest.raises(RuntimeError), patched(model, strict=True):
        pass
    assert classes(model) == now
    with patched(model):
        pass
    assert classes(model) == now


def test_a_nested_patched_takes_back_what_it_added(model):
    patch(model, residual=False)
    now = classes(model)
    with patched(model) as report:
        assert report.coverage["residual"] == (2, 2)
        assert classes(model) != now
    assert classes(model) == now


def test_patch_that_is_interrupted_leaves_the_model_as_it_was(model, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    before = classes(model)
    monkeypatch.setitem(patch.__globals__, "patch_layers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch(model)
    assert classes(model) == before


class Reduced(nn.LayerNorm):
    """Says itself how it is pickled."""

    def __reduce__(self):
        return type(self), (self.normalized_shape,), self.__dict__


def test_pickle_of_a_class_with_its_own_reduce():
    model = nn.Sequential(Reduced(4))
    patch(model)
    assert type(model[0]) is not Reduced
    assert type(pickle.loads(pickle.dumps(model))[0]) is Reduced


def test_kinds_can_be_switched_off(model):
    whole = llama_coverage(2)
    for kind in whole:
        report = patch(model, **{kind: False})
        lost = {kind, "residual"} if kind == "norm" else {kind}
        assert {k for k, (fused, _) in report.coverage.items() if fused} == whole.keys() - lost
        unpatch(model)


def test_a_kind_that_is_switched_on_later_joins_the_others(model):
    out = model(IDS).logits
    for kinds in ({"mlp": False, "linear": False}, {"residual": False}, {}):
        report = patch(model, **kinds)
    assert report.coverage == llama_coverage(2)
    torch.testing.assert_close(model(IDS).logits, out)
    layer, mlp = model.model.layers[0], model.model.layers[0].mlp
    assert layer._fusedops.lines >= {"residual"} and mlp._fusedops.lines >= {"mlp"}
    unpatch(model)
    assert torch.equal(model(IDS).logits, out)


def test_bad_arguments(model):
    with pytest.raises(TypeError, match=r"patch: model must be a torch.nn.Module, got dict"):
        patch({})
    with pytest.raises(TypeError, match=r"unpatch: model must be"):
        unpatch(None)
    with pytest.raises(ValueError, match=r"quantize_weight: format must be one of .* got 'int3'"):
        patch(model, quantize="int3")


@grid(build=[llama, bert], dtype=[torch.float32, torch.bfloat16])
def test_verify(build, dtype):
    model = build().to(dtype).train()
    state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    patch(model, verify={"input_ids": IDS, "labels": IDS})
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert classes(model) != classes(build())


def test_verify_of_a_frozen_model(model):
    patch(model.requires_grad_(False), verify={"input_ids": IDS, "labels": IDS})


def with_infinities(at):
    class Masking(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.arange(4) == at[0], -float("inf"))

    return nn.Sequential(nn.LayerNorm(4), Masking())


def test_verify_takes_equal_infinities_for_equal(monkeypatch):
    at = [0]
    patch(with_infinities(at), verify=torch.randn(3, 4))
    model = with_infinities(at)

    def move(*_):
        at[0] = 1

    monkeypatch.setitem(patch.__globals__, "patch_layers", move)
    with pytest.raises(RuntimeError, match="beyond rounding in output"):
        patch(model, verify=torch.randn(3, 4))


def test_verify_unpatches_and_raises(model, monkeypatch):
    def wrong(norm, x, residual, p):
        return norm(x), x + residual

    monkeypatch.setattr(residual, "_fused_sum", wrong)
    with pytest.raises(RuntimeError, match="beyond rounding in logits"):
        patch(model, verify=IDS)
    assert classes(model) == classes(llama())


def test_verify_sees_a_wrong_eps(model, monkeypatch):
    run = residual._fused_sum

    def wrong(norm, x, residual, p):
        norm.variance_epsilon *= 4
        try:
            return run(norm, x, residual, p)
        finally:
            norm.variance_epsilon /= 4

    monkeypatch.setattr(residual, "_fused_sum", wrong)
    with pytest.raises(RuntimeError, match="beyond rounding"):
        patch(model, verify={"input_ids": IDS, "labels": IDS})


def test_no_warning_where_something_was_fused(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(model)
