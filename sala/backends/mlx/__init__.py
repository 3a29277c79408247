"""The MLX backend, for Apple Silicon: executor → dispatch (selects kernels) → model → ops (reference) and kernels.

Its files have the names and the order of those of the torch backend. Two properties of MLX make the difference: arrays
are computed lazily, in the order of their dependencies, and an array is updated in place only if nothing else refers to
it. So a pool of pages is written once in a step, before it is read, and no step begins before the last one has ended.
"""
