"""The readable specification of the model: each op a plain function with its shape contract.

Shapes: T packed tokens, S sequences, H query heads, G kv heads, D head dim, B block size, N blocks.
"""
