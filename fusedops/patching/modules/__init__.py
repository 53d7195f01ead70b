"""Sites that are recognised by running a module: norms, activations, linears."""
