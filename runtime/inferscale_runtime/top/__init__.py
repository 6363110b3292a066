"""``inferscale top``: live tiers, hits and GPU memory of server pods, read from their status."""
