"""The machine code of the Triton norm kernels, compiled ahead of time: no GPU is needed.

Registers must not spill, and a row must move 16 bytes at a time, no oftener than the kernels say.
The numerics are tested where those of all backends are. Here a process of its own compiles,
because TRITON_INTERPRET=1, which those tests need, replaces triton.jit.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

import fusedops

pytest.importorskip("triton")

ARCHITECTURES = [80, 90]
KINDS = ["layer with dropout", "rms_llama"]
# Rows that share a program, one to a program, the longest in registers, and walked in blocks.
FORWARD = list(product(["forward"], KINDS, [64, 4096, 16384, 65536], ARCHITECTURES))
BACKWARD = list(product(["backward"], KINDS, [64, 2048, 8192, 65536], ARCHITECTURES))
ODD = list(product(["forward", "backward"], KINDS[:1], [4001, 8001], ARCHITECTURES[1:]))
REDUCE = list(product(["reduce"], KINDS[:1], [4096], ARCHITECTURES))


@pytest.fixture(scope="module")
def machine_code() -> dict[str, dict[str, int]]:
    """How often each load and store occurs in the code of each configuration."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    package = str(Path(fusedops.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join([package, env.get("PYTHONPATH", "")])
    run = [sys.executable, __file__]
    return json.loads(subprocess.run(run, env=env, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize("configuration", FORWARD + BACKWARD + ODD + REDUCE, ids=str)
def test_registers_do_not_spill(machine_code, configuration):
    code = machine_code[str(configuration)]
    assert code
    assert not [op for op in code if op.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("configuration", FORWARD, ids=str)
def test_forward_moves_whole_vectors(machine_code, configuration):
    _, kind, n, _ = configuration
    tile, vectors = tile_and_vectors("forward", n)
    loads = 4 if kind.startswith("layer") else 3  # x, residual, weight, bias
    assert moved(machine_code, configuration) == (
        (loads + tile["LOOP"]) * vectors,  # h again
        2 * vectors,  # h, y
    )


@pytest.mark.parametrize("configuration", BACKWARD, ids=str)
def test_backward_moves_whole_vectors(machine_code, configuration):
    _, kind, n, _ = configuration
    tile, vectors = tile_and_vectors("backward", n)
    sums = 2 if kind.startswith("layer") else 1  # dweight, dbias: float32
    partial = 2 * vectors * sums if tile["ROWS"] == 1 else 0  # short rows: less than a vector
    again = 3 * vectors + partial if tile["LOOP"] else 0  # dy, h, weight, and the sums so far
    gradients = 2 if "dropout" in kind else 1  # dresidual, dx
    assert moved(machine_code, configuration) == (
        4 * vectors + again,  # dy, dh, h, weight
        gradients * vectors + partial,
    )


def moved(machine_code, configuration) -> tuple[int, int]:
    """The 16-byte loads and stores of a thread."""
    code = machine_code[str(configuration)]
    return code.get("LDG.E.128", 0), code.get("STG.E.128", 0)


def tile_and_vectors(direction: str, n: int) -> tuple[dict, int]:
    """The tile, and the 16-byte vectors of bfloat16 that each thread has of it."""
    from fusedops.triton.norm import backward, forward
    from fusedops.triton.norm.tile import tile_of

    tile = tile_of(n, forward.LONGEST if direction == "forward" else backward.LONGEST)
    return tile, tile["ROWS"] * tile["BLOCK"] // (32 * tile["num_warps"] * 8)


def kernel_and_constants(direction: str, kind: str, n: int):
    from fusedops.triton.norm import backward, forward

    if direction == "reduce":
        constants = {"ROWS": backward.REDUCE_ROWS, "COLS": backward.REDUCE_COLS}
        return backward.reduce_kernel, constants | backward.OPTIONS | {"num_warps": 4}
    constants = {"KIND": kind.split()[0], "OFFSET": 0.0, **tile_and_vectors(direction, n)[0]}
    module = {"forward": forward, "backward": backward}[direction]
    return getattr(module, f"{direction}_kernel"), constants


def argument_types(direction: str, kind: str) -> dict[str, str]:
    """Of the arguments that are given, in bfloat16 with float32 sums; the others are None."""
    names = {
        "forward": "x residual weight y h",
        "backward": "dy dh h weight dresidual",
        "reduce": "dweight dbias",
    }[direction].split()
    types = dict.fromkeys(names, "*bf16") | {"stats": "*fp64", "eps": "fp32", "scale": "fp32"}
    types |= {"threshold": "u32", "rows": "i32", "n": "i32", "programs": "i32"}
    types |= {"dweight_rows": "*fp32", "dbias_rows": "*fp32"}
    if direction == "backward":
        types["dweight"] = "*fp32"
    if kind.startswith("layer"):
        types |= {"bias": "*bf16"} | ({"dbias": "*fp32"} if direction == "backward" else {})
    return types | ({"seed": "*i64", "dx": "*bf16"} if "dropout" in kind else {})


def compile_configuration(direction: str, kind: str, n: int, arch: int) -> Counter:
    import triton
    from triton.backends.compiler import GPUTarget

    kernel, constants = kernel_and_constants(direction, kind, n)
    types, names = argument_types(direction, kind), kernel.arg_names
    aligned = [t for t in names if types.get(t, "").startswith("*") or (t == "n" and n % 16 == 0)]
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={name: constants.get(name) for name in names if name not in types},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {k: v for k, v in constants.items() if k not in names}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Counter(re.findall(r"\b(?:LDG|STG|LDL|STL)[.\w]*", binary.asm["sass"]))


if __name__ == "__main__":
    every = FORWARD + BACKWARD + ODD + REDUCE
    print(json.dumps({str(c): compile_configuration(*c) for c in every}))
