"""Steps with a known bottleneck, and whether `fusedops.profile` finds it: `make profile-matrix`."""
