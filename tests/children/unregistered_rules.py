"""Child script of test_dtensor.py: patches a model when fusedops' DTensor rules fail to import.

A patched model then runs its own code on DTensors.
"""

import sys
from pathlib import Path

import torch
import torch.distributed.tensor._ops.utils as utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from children.ranks import group

renamed = utils.expand_to_full_mesh_op_strategy
del utils.expand_to_full_mesh_op_strategy

import fusedops  # noqa: E402  with the name missing
from fusedops.patching import fuse_always  # noqa: E402

utils.expand_to_full_mesh_op_strategy = renamed
assert "fusedops.integrations.dtensor" not in sys.modules

with group(0, 1, Path(sys.argv[1]) / "meeting"), fuse_always():
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    x = torch.randn(2, 3, 8)
    want = model(x)
    for module in model:
        for name, p in list(module.named_parameters()):
            sharded = distribute_tensor(p.detach(), mesh, [Replicate()])
            setattr(module, name, torch.nn.Parameter(sharded))
    assert len(fusedops.patch(model).fused) == 2
    out = model(distribute_tensor(x, mesh, [Shard(1)]))
    torch.testing.assert_close(out.full_tensor(), want)
    print("unfused")
