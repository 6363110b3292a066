"""server of the InferScale runtime."""
