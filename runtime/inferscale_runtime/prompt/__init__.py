"""Prompt layout: ``[preamble][facts, best last][text facts][footer, client's text]`` (pure)."""
