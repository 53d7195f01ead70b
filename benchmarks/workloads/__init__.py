"""What users run: training steps, generation, embedding sentences."""
