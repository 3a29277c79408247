"""What MLX writes around the body of a kernel: parameters from the names, dtypes and sizes of the arrays."""

from sala.backends.mlx.kernels import metal
from sala.backends.mlx.kernels.metal import Launch

CONSTANT_BELOW = 8  # numbers; shorter inputs come in the constant address space
TYPES = {
    "float32": "float",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "uint32": "uint32_t",
}
ATTRIBUTES = {  # in the order in which MLX looks for them
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_threadgroup": "uint3",
}


def type_name(dtype: object) -> str:
    return TYPES[str(dtype).rpartition(".")[2]]


def parameters(launch: Launch) -> list[tuple[str, str]]:
    """(declaration, name) of every parameter, in order."""
    source = metal.source(launch.kernel)
    found = []
    for name, array in launch.inputs.items():
        space = "constant" if array.size < CONSTANT_BELOW else "device"
        mark = "*" if array.ndim else "&"
        found.append((f"const {space} {type_name(array.dtype)}{mark} {name}", name))
        if array.ndim:
            for suffix, kind in (("_shape", "int*"), ("_strides", "int64_t*"), ("_ndim", "int&")):
                if name + suffix in source:
                    found.append((f"const constant {kind} {name}{suffix}", name + suffix))
    found += [(f"device {type_name(dtype)}* {name}", name) for name, (_, dtype) in launch.outputs.items()]
    found += [(f"{kind} {name}", name) for name, kind in ATTRIBUTES.items() if name in source]
    return found


def template_lines(launch: Launch) -> list[str]:
    return [
        f"constexpr int {name} = {value};" if isinstance(value, int) else f"typedef {type_name(value)} {name};"
        for name, value in launch.template.items()
    ]
