"""One module per task: it makes the cases and scores the answers, and runs no model."""
