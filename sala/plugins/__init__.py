"""Other people's programs, each with SALA in it."""
