"""One module per family of formats: bytes in, sections out. They run in the child process only."""
