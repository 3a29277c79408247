"""Speed and memory of a model on this machine, against a dense model, and of single kernels."""
