"""The two kinds as pydantic models: the one source of schema, defaults and reference pages."""
