"""The demonstration: a sample memory of an invented person and the command that uses it."""
