"""The store: immutable data files and one atomic manifest per user."""
