"""Fused forward passes that replace the plain model where kernels are available."""
