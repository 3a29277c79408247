"""Policy without tensors: which tokens run next, and what of the past is kept."""
