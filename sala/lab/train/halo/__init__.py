"""HALO: a dense model becomes a hybrid by aligning, choosing, distilling and tuning."""
