"""Tools for researchers: train, fine-tune, quantize, evaluate and measure models."""
