"""The MLX backend, for Apple Silicon: executor → model → ops (→ kernels).

Its files have the names and the order of the torch backend's. What differs is MLX's: arrays are computed when they are
asked for, in the order of their dependencies, and an update of an array happens in place only while nobody else holds
it. So a pool of pages is written once in a step, before it is read, and no step begins before the last one has ended.
"""
