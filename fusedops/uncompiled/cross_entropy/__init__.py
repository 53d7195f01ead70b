"""The cross-entropy operators in plain PyTorch; the C++ version is in csrc/ops/cross_entropy."""
