"""packing of the InferScale runtime."""
