"""The HTTP layer: connections, request bodies, security, errors, server-sent events, the web page."""
