"""Fuses attention in a model's own code: calls of torch's function, and written-out softmax."""
