"""encode of the InferScale runtime."""
