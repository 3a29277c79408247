"""HALO: convert a dense model into a hybrid by alignment, layer selection, distillation and tuning."""
