"""Quantization: from a checkpoint to one in the layout of MLX, layer by layer."""
