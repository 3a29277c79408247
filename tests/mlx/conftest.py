"""MLX in fp32, on the CPU unless a Mac is there; without MLX there is nothing to test."""

from importlib.util import find_spec

from tests.mlx.place import DEVICE

if find_spec("mlx") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import mlx.core as mx

    mx.set_default_device(mx.gpu if DEVICE == "gpu" else mx.cpu)
