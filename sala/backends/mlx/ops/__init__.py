"""The reference: each operation of the model as a plain function with its shape contract. Nothing here uses kernels.

Shapes: T packed tokens, S sequences, H query heads, G kv heads, D head dim, B block size, N blocks.
"""
