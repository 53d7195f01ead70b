"""Predicts how fast GPU kernels run, from counted instructions and bytes.

device.py has the constants, model.py turns loops into seconds, and sass_loops.py counts loops in
machine code. triton_loops.py and cuda_loops.py compile kernels for that. rows.py has the predicted
calls, published.py other projects' kernels, and table.py writes both down. The page
docs/design/performance_model.md has the model's limits. A prediction is not a measurement.
"""
