"""Cache policies from the literature, one a file, for comparison in reports; nothing here runs in a server."""
