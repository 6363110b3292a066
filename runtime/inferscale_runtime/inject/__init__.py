"""inject of the InferScale runtime."""
