"""Recognises norms, activations and linear layers, mostly by running them, and patches them."""
