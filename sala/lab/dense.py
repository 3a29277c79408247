"""Locate and load the dense models of transformers that ours are compared with; report what is missing."""

from pathlib import Path
from typing import Any

import torch

from sala.errors import InputError, SalaError

NEWEST = "pip install --upgrade transformers"


def need_transformers() -> Any:
    """Return transformers; raise SalaError, before anything is measured, if it is missing or too old."""
    try:
        import transformers
        from transformers.cache_utils import Cache, DynamicLayer  # noqa: F401
    except ImportError as error:
        is_old = getattr(error, "name", "") not in ("transformers", None)
        what = "is too old" if is_old else "is not installed"
        raise SalaError(f"transformers {what}", f"run: {NEWEST}") from None
    return transformers


def find_dense(source: str, field: str, remedy: str) -> Path:
    """Return the directory of a dense model; raise InputError about `field` if it is none."""
    path = Path(source).expanduser()
    if not (path / "config.json").is_file():
        raise InputError(field, f"{source} is not a model directory", remedy)
    return path


def load_dense(path: Path, device: torch.device, dtype: torch.dtype | str) -> Any:
    """Return a causal language model; raise SalaError with what transformers says if it cannot load it."""
    transformers = need_transformers()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        line = " ".join(str(error).split())[:300]
        raise SalaError(f"transformers cannot load {path}: {line}", "check that its files are complete") from None
    return model.to(device).eval()
