"""The HTTP layer: connections, limits, security, errors, server-sent events, the web page."""
