"""Benchmarks: what ``inferscale bench`` measures."""
