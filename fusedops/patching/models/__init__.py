"""Sites that are entered through hooks of transformers: attention and the loss."""
