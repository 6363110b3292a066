"""The activator: holds requests for a model without servers, wakes it, and forwards them."""
