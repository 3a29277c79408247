"""`sala serve`: the HTTP server, in the forms that clients of OpenAI's API know."""
