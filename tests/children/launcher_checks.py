"""Tests of fusedops' Triton launcher that test_launcher.py runs with a stub of CUDA's driver.

Their calls go through Triton's own driver and launcher; only CUDA's library is replaced.
"""

import gc
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs

from checks.launcher import stub as stubs
from fusedops.triton import launcher, tile

FACTOR = tl.constexpr(3.0)
DRIVER = stubs.install()
COMPILE = triton.compiler.compile
stubs.compile_nothing()


def toy(x, y, n, rows, scale, count: tl.uint32, flag, MODE: tl.constexpr, BLOCK: tl.constexpr = 16):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, 0) * scale * FACTOR + count
    if MODE == "sum":
        value += tl.load(y + at, at < n, 0)
    tl.store(y + at, value, (at < n) & (rows > 0))


def product(a, b, c, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@pytest.fixture
def kernel():
    """A kernel that nobody has launched."""
    return launcher.Kernel(triton.jit(toy, do_not_specialize=["rows"]))


@pytest.fixture
def arguments():
    x, y = torch.empty(64), torch.empty(64, dtype=torch.bfloat16)
    return {
        "x": x,
        "y": y,
        "n": 64,
        "rows": 3,
        "scale": 0.5,
        "count": 7,
        "flag": True,
        "MODE": "sum",
    }


def launched(kernel, grid=(2, 3), **arguments):
    """The launch, and whether it went through Triton; None if the driver saw none."""
    DRIVER.expect_nothing()
    before = DRIVER.last.launches, DRIVER.last.through_triton
    compiled = kernel[grid](**arguments)
    made, through_triton = DRIVER.last.launches - before[0], DRIVER.last.through_triton - before[1]
    assert made <= 1 and type(compiled).__name__ == "CompiledKernel"
    return (
        SimpleNamespace(**vars(DRIVER.launch()), through_triton=bool(through_triton))
        if made
        else None
    )


def through_triton(kernel, grid=(2, 3), **arguments):
    return launched(kernel, grid, **arguments).through_triton


@pytest.fixture
def warm(kernel, arguments):
    """The kernel, launched once."""
    assert through_triton(kernel, **arguments)
    assert not through_triton(kernel, **arguments)
    return kernel


def test_later_launches_are_tritons_own(warm, arguments):
    compiled = warm.through_triton((2, 3), **arguments)
    DRIVER.expect(compiled.src.signature.values())
    warm.through_triton((2, 3), **arguments)
    wanted = DRIVER.launch()
    assert warm[2, 3](**arguments) is compiled
    assert DRIVER.launch() == wanted
    assert wanted.grid == (2, 3, 1) and wanted.block == (128, 1, 1) and wanted.shared_bytes > 0
    x, y = arguments["x"].data_ptr(), arguments["y"].data_ptr()
    assert wanted.values == (x, y, 64, 3, 0x3F000000, 7, 1, 0, 0)


@pytest.mark.parametrize("grid", [(1,), (5, 6), (2, 3, 4), (2**31 - 1, 65535, 65535)], ids=str)
def test_grids(warm, arguments, grid):
    found = launched(warm, grid, **arguments)
    assert not found.through_triton and found.grid == (*grid, 1, 1)[:3]


@pytest.mark.parametrize("grid", [(0,), (2, 0), (1, 1, 0)], ids=str)
def test_an_empty_grid_launches_nothing(warm, arguments, grid):
    assert launched(warm, grid, **arguments) is None


@pytest.mark.parametrize("grid", [[2, 3], lambda facts: (facts["rows"],), (True, 2)], ids=str)
def test_unusual_grids_are_tritons(warm, arguments, grid):
    assert through_triton(warm, grid, **arguments)


def test_positions_defaults_and_names(warm, arguments):
    values = [*arguments.values()]
    DRIVER.expect(warm[1,](*values).src.signature.values())
    for given, named in ((8, 0), (5, 3), (8, 1), (0, 8)):
        keywords = dict([*arguments.items()][given : given + named]) if named else {}
        if named == 1:
            keywords = {"BLOCK": 16}
        before = DRIVER.last.through_triton
        warm[1,](*values[:given], **keywords)
        assert DRIVER.last.through_triton == before and DRIVER.launch().values[2:4] == (64, 3)
    assert through_triton(warm, **arguments, BLOCK=32)


def test_keywords_in_any_order(warm, arguments):
    DRIVER.expect(warm[1,](**arguments).src.signature.values())
    warm[1,](**arguments)
    wanted, through = DRIVER.launch(), DRIVER.last.through_triton
    for order in (reversed, sorted, list):
        warm[1,](**{name: arguments[name] for name in order(arguments)})
        assert DRIVER.launch() == wanted
    # As many keywords as before, but others.
    warm[1,](arguments["x"], **dict([*arguments.items()][1:]), BLOCK=16)
    assert DRIVER.launch() == wanted and DRIVER.last.through_triton == through


@pytest.mark.parametrize("change", [{"n": 1}, {"n": 65}, {"n": 2**40}, {"flag": 1}, {"scale": 2}])
@pytest.mark.parametrize("again", [False, True])
def test_another_specialization_is_another_variant(warm, arguments, change, again):
    first = launched(warm, **arguments)
    other = launched(warm, **arguments | change)
    assert other.through_triton and other.function != first.function
    if again and change != {"scale": 2}:
        assert not through_triton(warm, **arguments | change)
    assert launched(warm, **arguments).function == first.function


def test_values_that_triton_does_not_specialize_are_arguments(warm, arguments):
    for rows in (1, 16, 17, -1, 2**31 - 1):
        DRIVER.expect(warm[1,](**arguments).src.signature.values())
        before = DRIVER.last.through_triton
        warm[1,](**arguments | {"rows": rows})
        assert DRIVER.last.through_triton == before
        assert DRIVER.launch().values[3] == rows % 2**32


def test_a_value_that_does_not_fit_its_type_is_tritons(warm, arguments):
    """count is uint32 whatever comes: another range of it is another key here, not for Triton."""
    arguments["count"] = 2**31
    assert through_triton(warm, **arguments) and not through_triton(warm, **arguments)
    arguments["count"] = 2**32
    for _ in range(2):
        with suppress(OverflowError):  # not Triton 3.6
            assert through_triton(warm, **arguments)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_run(warm, arguments, name, monkeypatch):
    calls = []
    chain = getattr(knobs.runtime, name)
    chain.add(calls.append)
    assert through_triton(warm, **arguments) and len(calls) == 1
    chain.remove(calls.append)
    assert not through_triton(warm, **arguments)
    monkeypatch.setattr(knobs.runtime, name, calls.append)
    assert through_triton(warm, **arguments) and len(calls) == 2
    monkeypatch.setattr(knobs.runtime, name, None)
    assert not through_triton(warm, **arguments)


def test_a_hook_that_looks_like_an_empty_chain_runs(warm, arguments, monkeypatch):
    class Hook(list):
        calls = ()

        def __call__(self, metadata):
            self.append(metadata)

    hook = Hook()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
    assert through_triton(warm, **arguments) and len(hook) == 1


def test_pre_run_hooks_run(warm, arguments):
    calls = []
    warm.jit.add_pre_run_hook(lambda *args, **kwargs: calls.append(kwargs))
    assert through_triton(warm, **arguments) and len(calls) == 1
    warm.jit.pre_run_hooks.clear()
    assert not through_triton(warm, **arguments)


@pytest.mark.parametrize("name", ["debug", "instrumentation_mode", "fpsan_homomorphic_casts"])
def test_knobs_are_in_the_key(warm, arguments, name, monkeypatch):
    first = launched(warm, **arguments)
    of = knobs.runtime if name == "debug" else knobs.compilation
    if not hasattr(of, name):
        pytest.skip("this Triton has no such knob")
    monkeypatch.setattr(of, name, "other" if name == "instrumentation_mode" else True)
    other = launched(warm, **arguments)
    assert other.through_triton and other.function != first.function
    monkeypatch.undo()
    assert launched(warm, **arguments).function == first.function


def test_the_kernels_own_debug_is_in_the_key(warm, arguments):
    first = launched(warm, **arguments).function
    warm.jit.debug = True
    assert launched(warm, **arguments).function != first
    warm.jit.debug = None
    assert launched(warm, **arguments).function == first


def test_a_hook_of_the_compilers_stages_goes_through_triton(warm, arguments, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash"))
    assert through_triton(warm, **arguments) and through_triton(warm, **arguments)


def test_a_changed_global_raises_as_in_triton(warm, arguments, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(globals(), "FACTOR", tl.constexpr(4.0))
        with pytest.raises(RuntimeError, match="Global variable FACTOR has changed"):
            warm[2, 3](**arguments)
    assert not through_triton(warm, **arguments)


def test_options(warm, arguments):
    first = launched(warm, **arguments)
    other = launched(warm, **arguments, num_warps=8)
    assert other.through_triton and other.block == (256, 1, 1)
    assert launched(warm, **arguments, num_warps=8).function == other.function
    assert launched(warm, **arguments).function == first.function


@pytest.mark.parametrize("option", ["num_ctas", "launch_pdl", "launch_cooperative_grid", "debug"])
def test_options_that_are_not_known_are_tritons(warm, arguments, option):
    for _ in range(3):
        found = launched(warm, **arguments | {option: 2 if option == "num_ctas" else True})
        assert found.through_triton and (found.attributes > 0) == (option != "debug")


@pytest.mark.parametrize("fact", ["global_scratch_size", "num_ctas", "launch_pdl", "shared"])
def test_a_kernel_that_needs_more_is_tritons(kernel, arguments, fact, monkeypatch):
    plain = launcher.launches_plainly

    def changed(compiled):
        value = 228 * 1024 if fact == "shared" else 2
        facts = compiled.metadata._replace(**{fact: value})
        return plain(SimpleNamespace(run=compiled.run, metadata=facts))

    monkeypatch.setattr(launcher, "launches_plainly", changed)
    assert through_triton(kernel, **arguments) and through_triton(kernel, **arguments)


def test_streams_and_devices_are_the_current_ones(warm, arguments, monkeypatch):
    first = launched(warm, **arguments)
    monkeypatch.setattr(DRIVER, "stream", 0x7000)
    other = launched(warm, **arguments)
    assert not other.through_triton and (first.stream, other.stream) == (0, 0x7000)
    monkeypatch.setattr(DRIVER, "device", 1)
    on_one = launched(warm, **arguments)
    assert on_one.through_triton and on_one.function != first.function
    assert launched(warm, **arguments).function == on_one.function
    monkeypatch.setattr(DRIVER, "device", 0)
    assert launched(warm, **arguments).function == first.function


def test_tensors_of_another_device_are_tritons(kernel, arguments, monkeypatch):
    """Triton accepts pinned memory, and raises an error for what the GPU cannot read."""
    active = triton.runtime.driver.active
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(active, "get_active_torch_device", lambda: cuda, raising=False)
    assert through_triton(kernel, **arguments) and through_triton(kernel, **arguments)


def test_no_context_goes_through_triton(warm, arguments):
    DRIVER.set("no_context", 1)
    found = through_triton(warm, **arguments)
    DRIVER.set("no_context", 0)
    assert found and not through_triton(warm, **arguments)


def test_an_error_of_the_driver_names_the_kernel(warm, arguments):
    DRIVER.set("fails", 1)
    with pytest.raises(RuntimeError, match="cuLaunchKernel of toy: a planted error"):
        warm[2, 3](**arguments)
    DRIVER.set("fails", 0)
    assert not through_triton(warm, **arguments)


def unusual():
    """Tensors without memory of their own, subclasses, and what else is no plain tensor."""
    plain = torch.empty(64)
    with FakeTensorMode() as mode:
        fake = torch.empty(64)
    kept = []
    torch.func.vmap(lambda t: kept.append(t) or t.sum())(torch.empty(2, 64))
    torch.func.grad(lambda t: kept.append(t) or t.sum())(plain)
    functional = torch._to_functional_tensor(plain)
    subclass = plain.as_subclass(type("Mine", (torch.Tensor,), {}))
    sparse, mkldnn = torch.eye(4).to_sparse(), plain.to_mkldnn()
    assert mode
    return [fake, *kept, functional, subclass, sparse, mkldnn, 16, "x", (plain,), object()]


@pytest.mark.parametrize("x", unusual(), ids=lambda x: type(x).__name__)
def test_unusual_arguments_have_no_key(warm, arguments, x):
    if isinstance(x, int):
        assert warm.key(**arguments | {"x": x}) != warm.key(**arguments)
    else:
        assert warm.key(**arguments | {"x": x}) is None


def test_wrong_calls_raise_tritons_errors(warm, arguments):
    del arguments["MODE"]
    with pytest.raises(TypeError, match="MODE"):
        warm[1,](**arguments)
    with pytest.raises(TypeError, match="multiple values"):
        warm[1,](*arguments.values(), "sum", x=arguments["x"])
    with pytest.raises(TypeError):
        warm[1,](*arguments.values(), "sum", 16, 17)
    with pytest.raises(KeyError, match="unknown"):
        warm[1,](**arguments, MODE="sum", unknown=1)
    with pytest.raises(TypeError):
        warm.launch()


def test_a_key_too_long_is_tritons(warm, arguments):
    arguments["MODE"] = "m" * 3000
    assert warm.key(**arguments) is None
    assert through_triton(warm, **arguments) and through_triton(warm, **arguments)


def test_strings_that_begin_alike_are_different(warm, arguments):
    texts = ["", "a", "a\0", "ab", "\0", "i", "s"]
    assert len({warm.key(**arguments | {"MODE": text}) for text in texts}) == len(texts)


def test_a_capture_launches_what_is_known_only(arguments, monkeypatch):
    kernel = tile.launched(triton.jit(toy))
    assert type(kernel) is launcher.Kernel
    kernel[1,](**arguments)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not through_triton(kernel, **arguments)
    with pytest.raises(RuntimeError, match=r"toy is not compiled .*call fusedops\.warm"):
        kernel[1,](**arguments | {"n": 65})


def test_an_unproven_triton_is_left_alone(monkeypatch):
    jit = triton.jit(toy)
    monkeypatch.setattr(triton, "__version__", "3.5.9")
    assert tile.launched(jit) is jit
    monkeypatch.undo()
    assert triton.__version__ in launcher.PROVEN


def test_a_variable_leaves_all_launches_to_triton(monkeypatch):
    jit = triton.jit(toy)
    monkeypatch.setenv("FUSEDOPS_LAUNCHER", "triton")
    assert tile.launched(jit) is jit
    monkeypatch.setenv("FUSEDOPS_LAUNCHER", "no")
    with pytest.raises(ValueError, match="FUSEDOPS_LAUNCHER must be 'triton' or empty, got 'no'"):
        tile.launched(jit)


def test_a_hook_that_stops_compilations_keeps_nothing(kernel, arguments, monkeypatch):
    """As the checks of machine code use it."""
    stopped = []
    hook = lambda **facts: stopped.append(facts) or True  # noqa: E731
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", hook)
    for count in (1, 2):
        assert kernel[1,](**arguments) is None and len(stopped) == count


def test_threads(warm, arguments):
    """Each has variants of its own, and every launch is the right one."""
    functions, errors = {}, []

    def work(i):
        try:
            for count in range(60):
                values = arguments | {"MODE": f"mode {i % 4} {count % 15}"}
                compiled = warm[1,](**values)
                handle = functions.setdefault(values["MODE"], compiled.function)
                assert compiled.function == handle and compiled.src.constants[7,] == values["MODE"]
        except Exception as error:  # noqa: BLE001, a thread's, which the test reports
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors and len({*functions.values()}) == len(functions) == 60


def test_a_launch_keeps_no_reference(warm, arguments):
    counted = [*arguments.values(), warm.through_triton, warm[1,](**arguments), DRIVER]

    def references():
        gc.collect()
        return [sys.getrefcount(one) for one in counted]

    before = references()
    for _ in range(1000):
        warm[2, 3](**arguments)
    # Others count too, for example what the collector has not seen yet.
    assert all(abs(now - then) < 500 for now, then in zip(references(), before, strict=True))


def test_a_kernel_that_triton_compiles(monkeypatch):
    """Its metadata and its binary are a compiler's, for sm_90."""
    monkeypatch.setattr(triton.compiler, "compile", COMPILE)
    kernel = launcher.Kernel(triton.jit(product))
    a, b = torch.empty(64, 64, dtype=torch.float16), torch.empty(64, 64, dtype=torch.float16)
    call = {"a": a, "b": b, "c": torch.empty(64, 64), "BLOCK": 64, "num_warps": 8}
    first = launched(kernel, (1,), **call)
    DRIVER.expect(kernel[1,](**call).src.signature.values())
    kernel[1,](**call)
    found = DRIVER.launch()
    kernel.through_triton((1,), **call)
    assert first.through_triton and found == DRIVER.launch()
    assert found.shared_bytes > 0 and found.block == (256, 1, 1)
