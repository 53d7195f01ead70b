"""The CUDA emulator and sanitizers report every planted bug, and correct kernels run right."""

import fcntl
import os
import re
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]
TOYS = ROOT / "tests" / "simt"

# As the build compiles csrc/cuda; the hooks are not linked with their sanitizer's library.
FLAGS = ["-O1", "-g1", "-std=c++20", "-fopenmp", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
BUILDS = {
    "hooks": (["-fsanitize=thread"], []),
    "ucontext": (["-fsanitize=thread", "-DFUSEDOPS_SIMT_UCONTEXT"], []),
    "asan": (SANITIZERS, SANITIZERS),
}

FIRST = "block (0, 0, 0), thread "
DYNAMIC = "dynamic shared memory"
UNORDERED = "and nothing orders the two: a race"
# Toy: what is said of it. {bug} and {other} are the lines that its comments mark.
BARRIERS = {
    "barrier_after_exit": FIRST + "(0, 0, 0) waits at __syncthreads at {bug}; "
    "thread (5, 0, 0) never comes: it exited",
    "barrier_in_both_branches": FIRST + "(0, 0, 0) waits at __syncthreads at {bug}; "
    "thread (40, 0, 0) never comes: it waits at __syncthreads at {other}",
    "barrier_in_one_branch": FIRST + "(32, 0, 0) waits in __syncwarp at {other} with mask "
    "0x000001ff; thread (40, 0, 0) never comes: it waits at __syncthreads at {bug}",
    "syncwarp_in_one_branch": FIRST + "(0, 0, 0) waits in __syncwarp at {bug} with mask "
    "0xffffffff; thread (7, 0, 0) never comes: it exited",
    "atomic_that_waits_for_nobody": FIRST + "(0, 0, 0) repeats an atomic at {bug}, "
    "and nothing changes",
}
WARPS = {
    "shuffle_without_a_lane": FIRST + "(51, 0, 0) calls __shfl_xor_sync at {bug} in sum_of_pair "
    "at {other} with mask 0xffffffff: lane 18 has exited",
    "shuffle_after_exit": FIRST + "(0, 0, 0) waits in __shfl_down_sync at {bug} with mask "
    "0xffffffff; thread (20, 0, 0) never comes: it exited",
    "shuffle_in_a_short_warp": FIRST + "(32, 0, 0) calls __shfl_sync at {bug} with mask "
    "0xffffffff: lane 20 does not exist in this warp",
    "shuffle_of_a_stranger": FIRST + "(16, 0, 0) calls __shfl_sync at {bug} with mask "
    "0x0000ffff: lane 16 calls it and is not in the mask",
    "shuffle_from_outside": FIRST + "(16, 0, 0) calls __shfl_down_sync at {bug} with mask "
    "0x000fffff: lane 20 is read and is not in the mask",
    "vote_with_two_masks": FIRST + "(0, 0, 0) waits in __any_sync at {bug} with mask 0xffffffff; "
    "thread (16, 0, 0) never comes: it waits in __syncwarp at {other} with mask 0xffffffff",
    "vote_with_unlike_masks": FIRST + "(0, 0, 0) waits in __all_sync at {bug} with mask "
    "0xffffffff; thread (16, 0, 0) never comes: it waits in __all_sync at {bug} with mask "
    "0xfffffffe",
}
MEMORY = {
    "misaligned_load": FIRST + "(1, 0, 0) loads 16 bytes at the misaligned address 0x.*4 at {bug}",
    "misaligned_half_load": FIRST + "(1, 0, 0) loads 8 bytes at the misaligned address 0x.*4 "
    "at {bug}",
    "misaligned_store": FIRST + "(6, 0, 0) stores 16 bytes at the misaligned address 0x.*4 "
    "at {bug}",
    "misaligned_copy": FIRST + "(1, 0, 0) copies 16 bytes at the misaligned address 0x.*4 at {bug}",
    "too_much_static_memory": "block (0, 0, 0), more of 10000 bytes at {bug} has no room: a block "
    "has 48 KiB of static and 227 KiB of all shared memory",
}
SHARED = {
    "read_of_unwritten": FIRST + f"(9, 0, 0) reads bytes 36 to 39 of {DYNAMIC} at {{bug}}, "
    "which nobody wrote in this block",
    "read_before_a_copy_arrives": FIRST
    + f"(0, 0, 0) reads bytes 128 to 131 of {DYNAMIC} at {{bug}}, "
    "which nobody wrote in this block",
    "read_of_another_block": "block (1, 0, 0), thread (0, 0, 0) reads bytes 0 to 3 of kept "
    "at {bug}, which nobody wrote in this block",
    "past_a_static_array": FIRST + "(60, 0, 0) writes bytes 240 to 243 of row at {bug}, "
    "past its 240 bytes",
    "past_dynamic_memory": FIRST + f"(62, 0, 0) writes bytes 248 to 251 of {DYNAMIC} at {{bug}}, "
    "past its 250 bytes",
}
RACES = {
    "race_without_barrier": FIRST + "(32, 0, 0) writes bytes 128 to 131 of row at {other}, "
    "thread (31, 0, 0) writes them at {bug}, ",
    "race_of_read_and_write": FIRST + f"(31, 0, 0) reads bytes 0 to 3 of {DYNAMIC} at {{other}}, "
    "thread (0, 0, 0) writes them at {bug}, ",
    "race_within_a_warp": FIRST + f"(1, 0, 0) reads bytes 0 to 3 of {DYNAMIC} at {{bug}}, "
    "thread (0, 0, 0) writes them at {other}, ",
    "race_over_a_shuffle": FIRST + f"(0, 0, 0) reads bytes 4 to 7 of {DYNAMIC} at {{bug}}, "
    "thread (1, 0, 0) writes them at {other}, ",
    "race_with_a_late_lane": FIRST + "(0, 0, 0) writes bytes 0 to 3 of word at {bug}, "
    "thread (31, 0, 0) reads them at {other}, ",
    "race_with_an_early_lane": FIRST + "(0, 0, 0) writes bytes 0 to 3 of word at {bug}, "
    "thread (1, 0, 0) reads them at {other}, ",
    "race_with_another_warp": FIRST + "(32, 0, 0) writes bytes 0 to 3 of word at {bug}, "
    "thread (31, 0, 0) reads them at {other}, ",
    "race_of_atomic_and_read": FIRST + "(0, 0, 0) reads bytes 0 to 3 of count at {bug}, "
    "thread (31, 0, 0) atomically updates them at {other}, ",
    "race_of_atomic_and_late_read": FIRST + "(40, 0, 0) reads bytes 0 to 3 of count at {bug}, "
    "thread (0, 0, 0) atomically updates them at {other}, ",
    "race_of_vectors": FIRST + f"(4, 0, 0) reads bytes 52 to 55 of {DYNAMIC} at {{bug}}, "
    "thread (3, 0, 0) writes them at {other}, ",
    "race_of_a_half": FIRST + f"(40, 0, 0) reads bytes 0 to 3 of {DYNAMIC} at {{bug}}, "
    "thread (3, 0, 0) writes them at {other}, ",
    "race_in_late_blocks": "block (3, 1, 0), thread (1, 0, 0) reads bytes 0 to 3 of "
    f"{DYNAMIC} at {{bug}}, thread (0, 0, 0) writes them at {{other}}, ",
}
REFUSED = {
    "too_many_threads": "a block has 1 to 1024 threads, at most 64 along z, got (32, 33, 1)",
    "no_threads": "a block has 1 to 1024 threads, at most 64 along z, got (0, 1, 1)",
    "no_blocks": "a grid has at least one block, got (4, 0, 1)",
    "too_many_blocks": "a grid has at most 2147483647, 65535 and 65535 blocks, got (1, 65536, 1)",
    "too_much_shared_memory": "a block has at most 232448 bytes of shared memory, got 232449",
}
# What the sanitizers say themselves: the line is in the first frame of their report.
FRAME = r" .*\s+WRITE of size 4 .*\s+#0 \w+ in \w+.* \S*{bug}\s"
SANITIZED = {
    "past_a_static_array": r"{bug}:\d+: runtime error: index 60 out of bounds for type 'float ",
    "past_dynamic_memory": "use-after-poison" + FRAME,
    "past_global_memory": "heap-buffer-overflow" + FRAME,
}
EVERYWHERE = BARRIERS | WARPS | MEMORY
HOOKED = EVERYWHERE | SHARED | {name: text + UNORDERED for name, text in RACES.items()}
NAMED = [("hooks", name) for name in HOOKED] + [("asan", name) for name in EVERYWHERE]
NAMED += [("ucontext", name) for name in HOOKED if name != "atomic_that_waits_for_nobody"]  # 10 s


def toys(source):
    return re.findall(r'^ +(?:TOY\(|\{")(\w+)', (TOYS / source).read_text(), re.MULTILINE)


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """Compiles a file of toys, once for all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def compiled(source, build):
        path = folder / f"{Path(source).stem}-{build}"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                compile_toys(TOYS / source, build, path)
        return path

    return compiled


def compile_toys(source, build, path):
    compiling, linking = BUILDS[build]
    includes = [f"-I{folder}" for folder in (ROOT, *cpp_extension.include_paths())]
    unlinked = path.with_suffix(".o")
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *FLAGS, *compiling, *includes, "-x", "c++", "-c", source, "-o", unlinked]
    subprocess.run(command, check=True)
    subprocess.run([compiler, "-fopenmp", *linking, unlinked, "-o", path], check=True)


def said(program, toy, **env):
    env = {**os.environ, "OMP_NUM_THREADS": "3", **env}
    ran = subprocess.run([program, toy], env=env, capture_output=True, text=True, timeout=60)
    return (ran.stdout + ran.stderr).strip()


def marked(kind, toy):
    """`bugs.cu:12`, where line 12 ends in `// kind: toy`."""
    lines = (TOYS / "bugs.cu").read_text().splitlines()
    lines_marked = [i for i, line in enumerate(lines, 1) if line.endswith(f"// {kind}: {toy}")]
    return f"bugs.cu:{lines_marked[0]}" if lines_marked else None


def expected(toy, text):
    """Returns the pattern of an error: `.*` of the text is one, the rest is as it stands."""
    text = text.format(bug=marked("bug", toy), other=marked("with", toy))
    return re.escape(f"{toy}: {text}").replace(r"\.\*", r"\w*")


@pytest.mark.parametrize("build,toy", NAMED)
def test_names_the_bug(program, build, toy):
    message = said(program("bugs.cu", build), toy)
    assert re.fullmatch(expected(toy, HOOKED[toy]), message), message


@pytest.mark.parametrize("toy", SANITIZED)
def test_sanitizers_see_the_arena_and_the_fibers(program, toy):
    message = said(program("bugs.cu", "asan"), toy)
    assert re.search(SANITIZED[toy].format(bug=re.escape(marked("bug", toy))), message), message


@pytest.mark.parametrize("toy", REFUSED)
def test_refuses_what_a_gpu_refuses(program, toy):
    assert said(program("bugs.cu", "hooks"), toy) == f"nothing: {REFUSED[toy]}"


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("toy", toys("legal.cu"))
def test_runs_what_is_right(program, build, toy):
    assert said(program("legal.cu", build), toy) == "right"


def test_every_toy_has_its_message():
    assert set(toys("bugs.cu")) == set(HOOKED) | set(SANITIZED) | set(REFUSED)


def test_says_the_same_on_any_number_of_cpu_threads(program):
    path = program("bugs.cu", "hooks")
    messages = {said(path, "race_in_late_blocks", OMP_NUM_THREADS=n) for n in "1234"}
    assert len(messages) == 1


def test_names_addresses_without_addr2line(program):
    path = program("bugs.cu", "hooks")
    message = said(path, "barrier_after_exit", PATH="")
    assert f"waits at __syncthreads at {marked('bug', 'barrier_after_exit')};" in message
    assert re.search(r"reads .* at \S+\+0x[0-9a-f]+, ", said(path, "race_within_a_warp", PATH=""))
