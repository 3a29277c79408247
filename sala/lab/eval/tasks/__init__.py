"""One module per task: each makes cases and scores answers, without running a model."""
