"""The memory API: reading, writing, searching and erasing users' facts over HTTP (API process)."""
