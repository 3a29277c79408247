"""The HTTP layer: connections, security, request bodies, errors, the web page."""
