"""Selection of kernels (`dispatch.py`) and the fused forward passes that replace the plain model."""
