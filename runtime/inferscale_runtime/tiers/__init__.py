"""tiers of the InferScale runtime."""
