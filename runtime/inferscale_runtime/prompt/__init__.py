"""prompt of the InferScale runtime."""
