"""Sites recognised by running a module: norms, activations, linears."""
