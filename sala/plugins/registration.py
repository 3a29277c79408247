"""`sala.register()`: make other libraries know the model.

transformers and mlx-lm have no entry points for models, so a program that uses their loaders calls this once. vLLM and
SGLang have entry points and need no call.
"""

import warnings
from importlib.util import find_spec


def register() -> None:
    """Add the model to transformers' Auto classes and to mlx-lm, as far as they are installed.

    It may be called several times, before or after the libraries are imported.
    """
    if find_spec("transformers") is not None:
        from sala.plugins.transformers import register as register_transformers

        register_transformers()
    if find_spec("mlx_lm") is not None:
        try:
            from sala.plugins.mlx_lm import register as register_mlx_lm

            register_mlx_lm()
        except ImportError as error:  # a broken MLX must not stop a program that uses transformers
            warnings.warn(f"sala could not register its model with mlx-lm: {error}", stacklevel=2)
