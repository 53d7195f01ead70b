"""`fusedops.tune`: turns one knob of a training step at a time, and keeps what helps."""
