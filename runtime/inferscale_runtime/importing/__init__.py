"""Reads memories out of Mem0, Zep and Letta.

Layers: ``records`` (pure: what is read, as lines of the input format), ``client`` (HTTP with
retries), one reader for each tool, ``sync`` (a folder that follows a tool). docs/sources.md says
which version of each tool's documentation the readers follow.
"""
