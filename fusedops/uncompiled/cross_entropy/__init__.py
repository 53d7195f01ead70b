"""cross_entropy's operators in plain PyTorch, as csrc/ops/cross_entropy."""
