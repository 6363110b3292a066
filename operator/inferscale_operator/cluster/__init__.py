"""The Kubernetes API: client, server-side apply, cache of children, lease (I/O)."""
