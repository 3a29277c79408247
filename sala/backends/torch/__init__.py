"""The PyTorch backend: executor → model → ops (→ kernels)."""
