"""The PyTorch backend: executor → fast (selects kernels) → model → ops (reference) and kernels."""
