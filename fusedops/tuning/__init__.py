"""`fusedops.tune`: tries changes to a training step one by one, and keeps what helps."""
