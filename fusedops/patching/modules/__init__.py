"""Finds sites by running a module: norms, activations, linears."""
