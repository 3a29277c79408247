"""Quality of a model: tasks make prompts and score answers; likelihoods, perplexity and lm-eval."""
