"""What a model can do, measured: tasks make prompts and score answers."""
