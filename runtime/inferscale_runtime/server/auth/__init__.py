"""Who may call the server, and whose memory a caller may name (API process)."""
