"""Patched models generate, train, cast, save, load and take LoRA adapters as unpatched ones do."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest
import torch
from axes import grid
from torch.testing import assert_close

from fusedops import patch, patched, quantize, unpatch

transformers = pytest.importorskip("transformers")
from patching.models.attention_models import batch, build  # noqa: E402

CAUSAL = "llama", "gemma2", "gpt2", "gpt_oss"
ALL = (*CAUSAL, "bert", "t5")
NEAR = {"rtol": 2e-4, "atol": 2e-4}

# generate's arguments, by the name of what they ask for
SEARCHES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "beams that are drawn": {"num_beams": 3, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "without a cache": {"use_cache": False},
    "a static cache": {"cache_implementation": "static", "disable_compile": True},
    "words of the prompt": {"prompt_lookup_num_tokens": 3},
}


@pytest.fixture(autouse=True)
def ran(any_size, sums, calls):
    """Every test runs fused code."""
    yield
    assert sums.call_count or calls


def fuse(model, kinds=("norm", "residual", "linear", "attention")):
    """patch, which has to fuse sites of these kinds. No layer of T5 norms a sum of its own."""
    expected_kinds = {*kinds} - ({"residual"} if model.config.model_type == "t5" else set())
    assert expected_kinds <= {site.kind for site in patch(model).fused}


def outputs(model, given, **options):
    """Returns every tensor that a forward without gradients gives, flat."""
    with torch.no_grad():
        return list(tensors(model(**given, **options)))


def tensors(result):
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, dict):
        yield from tensors(tuple(result.values()))
    elif isinstance(result, tuple | list):
        for item in result:
            yield from tensors(item)


def step(model, given):
    """Returns the loss and the gradients of every parameter."""
    model.zero_grad()
    labels = given.get("decoder_input_ids", given["input_ids"])
    if (shown := given.get("attention_mask")) is not None and shown.shape == labels.shape:
        judged = shown * shown.roll(1, 1)  # not what padding predicts either
        labels = labels.masked_fill(judged == 0, -100)
    loss = model(**given, labels=labels).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(got, expected, **near):
    assert len(got) == len(expected)
    assert_close(got, expected, **near or NEAR)


def generated(model, given, **options):
    torch.manual_seed(3)
    given = {k: v for k, v in given.items() if k != "decoder_input_ids"}
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    return model.generate(**given, **options)


@grid(search=SEARCHES, name=["llama", "gemma2", "gpt2", "t5"])
def test_generate(name, search):
    side = None if "static" in search else "left"  # a mask says what causal would
    model, given, kwargs = build(name), batch(name, side), SEARCHES[search]
    if "words" in search:  # of one sequence alone
        given = {k: v[:1] for k, v in given.items()}
    expected = generated(model, given, **kwargs)
    with patched(model):
        assert torch.equal(generated(model, given, **kwargs), expected)
    assert torch.equal(generated(model, given, **kwargs), expected)


@pytest.mark.parametrize("whom", ["model", "assistant", "both"])
def test_assisted_generation(whom):
    """A smaller model proposes tokens; where it is wrong, caches are cut back."""
    model, given = build("llama"), {k: v[:1] for k, v in batch("llama").items()}
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    assistant = build("llama", config)
    expected = generated(model, given, assistant_model=assistant)
    for chosen in {"model": [model], "assistant": [assistant], "both": [model, assistant]}[whom]:
        fuse(chosen)
    assert torch.equal(generated(model, given, assistant_model=assistant), expected)


@grid(side=["left", "right"], name=ALL)
def test_padding(name, side):
    """Of padding, an output is what it may be: which tokens it sees is nobody's choice."""
    model, kwargs = build(name), batch(name, side)
    shown = kwargs["attention_mask"].bool() if name != "t5" else slice(None)
    expected, grads = model(**kwargs).logits[shown], step(model, kwargs)
    fuse(model)
    close([model(**kwargs).logits[shown]], [expected])
    close(step(model, kwargs), grads)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_packed_sequences(name):
    """Position ids that restart separate sequences, which do not see each other."""
    model, ids = build(name), batch(name)["input_ids"][:1]
    given = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])}
    expected, grads = outputs(model, given, use_cache=False), step(model, given)
    alone = outputs(model, {"input_ids": ids[:, 4:7]}, use_cache=False)
    close([expected[0][:, 4:7]], alone)
    fuse(model)
    close(outputs(model, given, use_cache=False), expected)
    close(step(model, given), grads)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "options",
    [
        {"return_dict": False},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"use_cache": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments(name, options):
    same_with(name, options)


@grid(name=CAUSAL, kept=[0, 1, torch.tensor([0, 3])])
def test_logits_to_keep(name, kept):
    same_with(name, {"logits_to_keep": kept})


def same_with(name, options):
    model, given = build(name), batch(name, "right")
    expected, plain = outputs(model, given, **options), outputs(model, given)
    fuse(model)
    close(outputs(model, given, **options), expected)
    close(outputs(model, given), plain)


@pytest.mark.parametrize("name", [name for name in ALL if name != "gpt_oss"])
def test_to_another_dtype_and_back(name):
    """Patched in float32. In bfloat16 it is as near to float64 as the model that is not patched."""
    model, other, given = build(name), build(name), batch(name)
    exact = outputs(build(name).double(), given)[0]
    fuse(model)
    off = [(outputs(m.bfloat16(), given)[0] - exact).abs().max() for m in (model, other)]
    assert off[0] <= 2 * off[1]
    for dtype in (torch.float64, torch.float32):
        close(outputs(model.to(dtype), given), outputs(other.to(dtype), given))


@grid(when=["before patch", "after patch"], name=["llama", "gpt2", "t5"])
def test_new_embeddings(name, when):
    model, given = build(name), batch(name)
    other = copy.deepcopy(model)
    other.resize_token_embeddings(71, mean_resizing=False)
    if when == "after patch":
        fuse(model)
    model.resize_token_embeddings(71, mean_resizing=False)
    other.load_state_dict(model.state_dict())
    if when == "before patch":
        fuse(model)
    tied = [m.get_input_embeddings().weight is m.get_output_embeddings().weight
            for m in (model, other)]  # fmt: skip
    assert tied[0] == tied[1]
    close(outputs(model, given), outputs(other, given))
    close(step(model, given), step(other, given))


@pytest.mark.parametrize("when", ["before patch", "after patch"])
def test_layers_on_disk(when, tmp_path):
    """With accelerate's dispatch_model, parameters are loaded only during a call."""
    accelerate = pytest.importorskip("accelerate")
    model, given = build("llama"), batch("llama", "left")
    expected, tokens = outputs(model, given), generated(model, given)
    where = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    where |= {"model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}
    if when == "after patch":
        fuse(model)
    model = accelerate.dispatch_model(model, where, main_device="cpu", offload_dir=tmp_path)
    if when == "before patch":
        fuse(model, ["attention"])  # all else has hooks
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    close(outputs(model, given), expected)
    assert torch.equal(generated(model, given), tokens)
    unpatch(model)
    close(outputs(model, given), expected)


@pytest.mark.parametrize("when", ["before patch", "after patch"])
def test_lora(when):
    """Adapters are trained, merged, unmerged, disabled and unloaded."""
    peft = pytest.importorskip("peft")
    names = ["q_proj", "down_proj", "lm_head"]
    config = peft.LoraConfig(
        r=2, target_modules=names, modules_to_save=["norm"], init_lora_weights=False
    )
    given = batch("llama", "right")

    def made(patches):
        model = build("llama")
        if patches and when == "after patch":
            fuse(model)
        torch.manual_seed(4)
        model = peft.get_peft_model(model, config).eval()
        if patches and when == "before patch":
            fuse(model, ["norm", "linear", "attention"])  # PEFT has wrapped the norms of sums
        return model

    def life(model):
        yield outputs(model, given)
        yield step(model, given)
        model.merge_adapter()
        yield outputs(model, given)
        model.unmerge_adapter()
        yield outputs(model, given)
        with model.disable_adapter():
            yield outputs(model, given)
        yield step(model, given)
        model = model.merge_and_unload()
        yield outputs(model, given)

    for got, expected in zip(life(made(True)), life(made(False)), strict=True):
        close(got, expected)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_dropout_comes_and_goes_with_training(name):
    model, given = build(name), batch(name)
    expected = outputs(model, given)
    fuse(model)
    model.train()
    assert not torch.equal(outputs(model, given)[0], outputs(model, given)[0])
    model.eval()
    close(outputs(model, given), expected)


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_quantized(format):
    """patch around quantized layers changes nothing."""
    model, other, given = build("llama"), build("llama"), batch("llama", "left")
    quantize(other, format)
    report = patch(model, quantize=format)
    assert {"norm", "residual", "mlp", "rotary", "attention"} <= {s.kind for s in report.fused}
    shown = given["attention_mask"].bool()
    got, expected = (outputs(m, given)[0][shown] for m in (model, other))
    close([got], [expected], rtol=0.02, atol=0.02)
    assert torch.equal(generated(model, given), generated(other, given))


@grid(kind=["DynamicCache", "StaticCache"], name=["llama", "gemma2"])
def test_a_cache_of_the_callers(name, kind):
    """The patched and the unpatched model fill it in turns."""
    model, ids = build(name), batch(name)["input_ids"]
    expected = outputs(model, {"input_ids": ids}, use_cache=False)[0]
    kwargs = {"max_cache_len": 16} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, **kwargs)
    fuse(model)
    pieces = []
    for at, piece in enumerate(ids.split((4, 1, 3, 1), dim=1)):
        if at == 2:
            unpatch(model)
        with torch.no_grad():
            pieces.append(model(piece, past_key_values=cache).logits)
    close([torch.cat(pieces, 1)], [expected])


def test_models_that_share_a_config():
    """One is patched; the other does not change."""
    model_a = build("llama")
    model_b = build("llama", model_a.config)
    given, expected = batch("llama"), outputs(model_a, batch("llama"))
    classes = [type(module) for module in model_b.modules()]
    assert model_a.config is model_b.config
    fuse(model_a)
    assert classes == [type(module) for module in model_b.modules()]
    assert model_b.config._attn_implementation == "sdpa"
    assert all(torch.equal(a, b) for a, b in zip(outputs(model_b, given), expected, strict=True))
    fuse(model_b)
    unpatch(model_a)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model_a, given), expected, strict=True))
    close(outputs(model_b, given), expected)


def test_threads():
    """Models patched, run and unpatched at the same time, and one that all of them run."""
    given = batch("llama")
    shared, expected = build("llama"), outputs(build("llama"), given)
    grads = step(build("gpt2"), batch("gpt2"))
    fuse(shared)

    def work(_):
        model = copy.deepcopy(models)[0]
        for _ in range(3):
            fuse(model)
            close(step(model, batch("gpt2")), grads)
            close(outputs(shared, given), expected)
            unpatch(model)
        close(step(model, batch("gpt2")), grads)
        return True

    models = [build("gpt2")]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_a_patched_model_is_freed():
    model = build("llama")
    fuse(model)
    step(model, batch("llama"))
    outputs(model, batch("llama"))
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_from_pretrained(tmp_path):
    model, given = build("llama", tie_word_embeddings=True), batch("llama")
    expected = outputs(model, given)
    fuse(model)
    model.save_pretrained(tmp_path)
    other = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert other.config._attn_implementation == "sdpa"
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert all(torch.equal(a, b) for a, b in zip(outputs(other, given), expected, strict=True))
    fuse(other)
    close(outputs(other, given), expected)
