"""Measures the accuracy of `fusedops.profile` and the overhead of `fusedops.recording`."""
