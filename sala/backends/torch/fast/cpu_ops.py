"""Two operations of the CPU in C++ (`kernels/attend.cpp`, `kernels/decode.cpp`): sparse attention and the state fold.

Called by `dispatch.py`. The functions named `can_…` say what the kernels can take, not whether they should run.
"""

import ctypes

import torch
from torch import Tensor

from sala.backends.torch.kernels import native

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # the page types that attend.cpp reads
_WIDEST_HEAD = 256  # that attend.cpp takes


def can_attend(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> bool:
    """Return whether the C++ kernel reads these pages; it has no backward pass."""
    block_size, dim = k_pages.shape[2:]
    is_plain = all(x.device.type == "cpu" and x.dtype in _FLOATS for x in (q, k_pages, v_pages))
    is_paged = k_pages.dtype == v_pages.dtype and k_pages.is_contiguous() and v_pages.is_contiguous()
    has_shape = dim % native.LANES == 0 and dim <= _WIDEST_HEAD and block_size % native.LANES == 0
    return is_plain and is_paged and has_shape and not torch.is_grad_enabled()


def attend(
    kernel: native.Kernel,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    selected: Tensor,
    positions: Tensor,
    scale: float,
) -> Tensor:
    """`ops.sparse.sparse_attention` in fp32, reading keys and values in place; no block may be selected twice."""
    groups, num_pages, block_size, dim = k_pages.shape
    assert not selected.numel() or int(selected.max()) < len(table), "a selected block has no page"
    table, selected, positions = (x.long().contiguous() for x in (table, selected, positions))
    queries = q.float().contiguous()
    out = torch.empty_like(queries)
    attention = native.AttentionStruct(
        *(x.data_ptr() for x in (queries, k_pages, v_pages, table, selected, positions, out)),
        num_queries=q.shape[0],
        num_heads=q.shape[1],
        num_groups=groups,
        dim=dim,
        num_pages=num_pages,
        block_size=block_size,
        num_blocks=table.shape[0],
        num_selected=selected.shape[-1],
        page_type=native.element_type(k_pages.dtype),
        num_threads=torch.get_num_threads(),
        scale=scale,
    )
    kernel.attend(ctypes.addressof(attention))
    return out.to(q.dtype)


def can_fold(k: Tensor, v: Tensor, state: Tensor) -> bool:
    """Return whether the C++ kernel takes these tensors; it has no backward pass."""
    is_plain = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (k, v, state))
    return is_plain and state.shape[-1] % native.LANES == 0 and not torch.is_grad_enabled()


def fold(kernel: native.Kernel, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> Tensor:
    """`ops.lightning.lightning_fold`, token by token as the fused decode does it: bit for bit the same state."""
    k, v, decay = k.contiguous(), v.contiguous(), torch.exp(-slopes)
    state = state.clone(memory_format=torch.contiguous_format)
    kernel.fold(state.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), *k.shape)
    return state
