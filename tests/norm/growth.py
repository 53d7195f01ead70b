"""Quantized norms and the norms' modules for the memory-growth tests in tests/growth."""

from growth.subject import ROWS, N, coded, nn_module, rows, two

from fusedops import functional as F
from fusedops import nn

X, ROW = (ROWS, N), (N,)

OPERATORS = {
    "add_rms_norm, int8": lambda: coded(
        lambda *args: F.add_rms_norm(*args, output_format="int8")[0], X, X, ROW
    ),
    "rms_norm, fp8": lambda: coded(
        lambda x, w: F.rms_norm(x, ROW, w, output_format="fp8"), X, ROW
    ),
}  # fmt: skip

MODULES = {
    "AddLayerNorm": lambda: nn_module(nn.AddLayerNorm(N, dropout_p=0.1), two),
    "AddRMSNorm": lambda: nn_module(nn.AddRMSNorm(N), two),
    "LayerNorm": lambda: nn_module(nn.LayerNorm(N), rows),
    "RMSNorm": lambda: nn_module(nn.RMSNorm(N), rows),
}
