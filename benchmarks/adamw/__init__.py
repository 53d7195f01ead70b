"""AdamW: the time of a step, and the loss that its state formats train to."""
