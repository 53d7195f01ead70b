"""`fusedops.sweep`: latency, throughput and memory of model variants, by batch size and length."""
