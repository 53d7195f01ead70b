"""`fusedops.sweep`: latency against throughput over batches, lengths and variants of a model."""
