"""Sites entered through transformers' hooks: attention and the loss."""
