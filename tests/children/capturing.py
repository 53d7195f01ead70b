"""Child script: lists the Triton kernels that refuse to compile in a simulated CUDA graph capture.

There is no GPU: the driver only knows the architecture to compile for, and a hook stops each launch
before it compiles.
"""

import importlib
import json

import torch
import triton
from triton import knobs

from checks.machine_code.launches import FAMILIES, NoGPU
from fusedops.triton import tile

launched: dict[str, bool] = {}  # kernel -> whether it refuses to compile in a capture
refusals: list[str] = []


def record(*, fn, **_):
    kernel = fn.jit_function
    launched[f"{kernel.fn.__module__}.{kernel.fn.__name__}"] = "_do_compile" in vars(kernel)
    return True


def main():
    triton.runtime.driver.set_active(NoGPU(90))
    knobs.runtime.jit_cache_hook = record
    capturing = False
    torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: capturing
    for family in FAMILIES:
        for _, _, call in importlib.import_module(family).calls(True):
            capturing = False
            call()
            capturing, count = True, len(launched)
            try:
                call()
            except RuntimeError as error:
                refusals.append(str(error))
            else:
                refusals.append("")
            assert len(launched) == count, "compiled during the capture"
    print(json.dumps({"launched": launched, "refusals": refusals, "compiled": tile.compiled}))


if __name__ == "__main__":
    main()
