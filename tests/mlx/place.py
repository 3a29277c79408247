"""Where these tests run: MLX on the CPU, or with SALA_TEST_MLX=gpu on the GPU of a Mac."""

import os

DEVICE = os.environ.get("SALA_TEST_MLX", "cpu")
