"""``inferscale up``: the same resources on one machine, containers as local processes."""
