"""``/inferscale/ui``: a web page on one user's memory, made of static files (API process)."""
