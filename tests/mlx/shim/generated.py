"""The whole source that MLX writes for a launch. It needs no Metal: a graph that is only exported is never run."""

import os
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

from sala.backends.mlx.kernels import metal
from sala.backends.mlx.kernels.metal import Launch


def generated_source(launch: Launch) -> str:
    """As MLX prints it, between its own marks."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 1)
        try:
            mx.export_function(str(Path(folder) / "graph.mlxfn"), lambda: metal.run(launch, is_shown=True))
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        caught.seek(0)
        text = caught.read().decode()
    return text.partition("```\n")[2].rpartition("```")[0]
