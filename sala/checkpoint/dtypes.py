"""The one table of precisions: what safetensors files, frameworks and numpy call them, and their sizes.

numpy has neither bfloat16 nor float8; their bits are kept in unsigned integers of the same size. The table holds names
only, so that modules which must not load numpy can use it.
"""

from typing import Any, NamedTuple


class Precision(NamedTuple):
    """One row of the table."""

    file: str  # in the header of a safetensors file
    name: str  # in config.json, torch and MLX
    numpy: str
    size: int  # bytes


PRECISIONS = (
    Precision("BF16", "bfloat16", "uint16", 2),
    Precision("F16", "float16", "float16", 2),
    Precision("F32", "float32", "float32", 4),
    Precision("F64", "float64", "float64", 8),
    Precision("F8_E4M3", "float8_e4m3fn", "uint8", 1),
    Precision("F8_E5M2", "float8_e5m2", "uint8", 1),
    Precision("BOOL", "bool", "bool", 1),
    Precision("U8", "uint8", "uint8", 1),
    Precision("I8", "int8", "int8", 1),
    Precision("U16", "uint16", "uint16", 2),
    Precision("I16", "int16", "int16", 2),
    Precision("U32", "uint32", "uint32", 4),
    Precision("I32", "int32", "int32", 4),
    Precision("U64", "uint64", "uint64", 8),
    Precision("I64", "int64", "int64", 8),
)
MODEL_PRECISIONS = PRECISIONS[:3]  # those that a model can be computed in

FILE_DTYPES = {row.name: row.file for row in MODEL_PRECISIONS}
FLOAT_DTYPES = tuple(FILE_DTYPES.values())
ITEM_SIZES = {row.file: row.size for row in PRECISIONS}
ELEMENT_BYTES = {row.name: row.size for row in MODEL_PRECISIONS}
NUMPY_DTYPES = {row.file: row.numpy for row in PRECISIONS}


def dtypes_by_name(framework: Any) -> dict[str, Any]:
    """Return torch's or MLX's dtypes of models by name, for example `bfloat16`."""
    return {row.name: getattr(framework, row.name) for row in MODEL_PRECISIONS}


def dtypes_by_file_name(framework: Any) -> dict[str, Any]:
    """Return torch's or MLX's dtypes by their names in safetensors files, as far as the framework has them."""
    return {row.file: getattr(framework, row.name) for row in PRECISIONS if hasattr(framework, row.name)}
