"""The norms' functions and modules for the memory-growth tests in tests/growth."""

from growth.subject import BF16, ROWS, N, Subject, coded, drawn, nn_module, of, rows, two

from fusedops import functional as F
from fusedops import nn

X, ROW = (ROWS, N), (N,)

OPERATORS = {
    "layer_norm": lambda: Subject(
        lambda x, w, b: F.layer_norm(x, ROW, w, b), drawn(X, ROW, ROW)
    ),
    "rms_norm": lambda: Subject(lambda x, w: F.rms_norm(x, ROW, w), drawn(X, ROW)),
    "rms_norm, Gemma's": lambda: Subject(
        lambda x, w: F.rms_norm(x, ROW, w, 1e-6, rounding="llama", offset=1.0),
        drawn(X, ROW, dtype=BF16),
    ),
    "add_layer_norm": lambda: of(F.add_layer_norm, X, X, ROW, ROW),
    "add_layer_norm, dropout": lambda: of(F.add_layer_norm, X, X, ROW, ROW, dropout_p=0.1),
    "add_rms_norm": lambda: of(F.add_rms_norm, X, X, ROW, dtype=BF16),
    "add_rms_norm, int8": lambda: coded(
        lambda *args: F.add_rms_norm(*args, output_format="int8")[0], X, X, ROW
    ),
    "rms_norm, fp8": lambda: coded(
        lambda x, w: F.rms_norm(x, ROW, w, output_format="fp8"), X, ROW
    ),
    "add_rms_norm, dropout": lambda: of(F.add_rms_norm, X, X, ROW, dropout_p=0.1),
}  # fmt: skip

MODULES = {
    "AddLayerNorm": lambda: nn_module(nn.AddLayerNorm(N, dropout_p=0.1), two),
    "AddRMSNorm": lambda: nn_module(nn.AddRMSNorm(N), two),
    "LayerNorm": lambda: nn_module(nn.LayerNorm(N), rows),
    "RMSNorm": lambda: nn_module(nn.RMSNorm(N), rows),
}
