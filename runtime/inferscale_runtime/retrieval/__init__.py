"""retrieval of the InferScale runtime."""
