"""`fusedops.tune`: turns a training step's knobs and keeps what helps."""
