"""SGLang implements SALA itself; this plug-in fixes an error there and runs the model without a GPU.

SGLang calls `register` in each of its processes (entry point group `sglang.srt.plugins`). Three hooks:

- Under tensor parallelism SGLang 0.5.23 normalises the output of a lightning layer over the heads of one rank instead
  of all heads, and generates other tokens. The hook sums the squares over the ranks. Whether it is needed is read
  from SGLang's source, so that it does nothing once SGLang is fixed.
- The linear-attention kernel is Triton, which needs a GPU. Without one, sala's reference is used.
- `--dense-as-sparse`, a flag of the vendor's fork, is a variable in SGLang: the hook adds the flag, which sets it.
"""

import argparse
import ast
import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sala.plugins import versions

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "sglang.srt.models.minicpm"
MIXER = "MiniCPMLightningMixer"
KERNEL = "sglang.kernels.ops.attention.linear.seg_la.seg_la_fwd"
FLAGS = "sglang.srt.server_args.ServerArgs.add_cli_args"

log = logging.getLogger(__name__)


class Norm(Enum):
    """How SGLang's source normalises the output of a lightning layer under tensor parallelism."""

    ABSENT = "has no lightning layers"
    PER_RANK = "normalises over the heads of each rank"
    OTHER = "normalises in an unknown way"


@functools.cache
def register() -> None:
    """Register with SGLang, which calls this in every process."""
    import torch

    version = versions.SGLANG.installed()
    try:
        if version is not None:
            versions.check(versions.SGLANG, version)
    except versions.UnsupportedVersion as error:
        log.error("SALA is left as SGLang has it: %s", error)  # other models must still run there
        return
    norm = read_norm(_find_source(MODEL))
    level = logging.WARNING if norm is Norm.OTHER else logging.INFO
    log.log(level, "SGLang %s: %s", norm.value, "repaired" if norm is Norm.PER_RANK else "left as it is")
    if norm is Norm.ABSENT:
        return
    from sglang.srt.configs.minicpm import MiniCPMHybridConfig
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from transformers import AutoConfig

    # SGLang's configuration stays under the model's name, also where `sala.register()` was called before.
    AutoConfig.register(MiniCPMHybridConfig.model_type, MiniCPMHybridConfig, exist_ok=True)
    HookRegistry.register(FLAGS, add_flags, HookType.AFTER)
    if norm is Norm.PER_RANK:
        HookRegistry.register(f"{MODEL}.{MIXER}.__init__", build_mixer, HookType.AROUND)
    if not torch.cuda.is_available():
        HookRegistry.register(KERNEL, run_segments, HookType.AROUND)


class DenseAsSparse(argparse.Action):
    """Sets the variable that makes SGLang select blocks for prompts of any length; its other processes inherit it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        os.environ["SGLANG_MINICPM_DENSE_AS_SPARSE"] = "1"


def add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    """Add the vendor's flag to SGLang's own, unless SGLang has it."""
    text = "Select blocks for prompts of any length, also for those that SALA reads densely."
    with contextlib.suppress(argparse.ArgumentError):
        parser.add_argument("--dense-as-sparse", nargs=0, action=DenseAsSparse, default=argparse.SUPPRESS, help=text)


def _find_source(module: str) -> str:
    """Return a module's source without importing it; an empty string if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return ""
    return Path(spec.origin).read_text() if spec is not None and spec.origin and spec.origin.endswith(".py") else ""


def read_norm(source: str) -> Norm:
    """Recognize the known error only: any other source is left alone."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == MIXER]
    if not classes:
        return Norm.ABSENT
    methods = {node.name: node for node in classes[0].body if isinstance(node, ast.FunctionDef)}
    if not {"__init__", "forward"} <= methods.keys():
        return Norm.OTHER
    built = [ast.unparse(node) for node in ast.walk(methods["__init__"]) if isinstance(node, ast.Assign)]
    used = [ast.unparse(node) for node in ast.walk(methods["forward"]) if isinstance(node, ast.Attribute)]
    is_local = any(line.startswith("self.o_norm = RMSNorm(self.num_heads * self.head_dim,") for line in built)
    is_plain = ast.unparse(methods["forward"]).count("o = self.o_norm(o)") == used.count("self.o_norm") == 1
    shares = any(word in ast.unparse(classes[0]) for word in ("all_reduce", "all_gather", "mean_square", "variance"))
    return Norm.PER_RANK if is_local and is_plain and not shares else Norm.OTHER


def build_mixer(original: Callable[..., None], mixer: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of SGLang's lightning layer so that its norm spans all heads."""
    original(mixer, *args, **kwargs)
    num_ranks = mixer.total_num_heads // mixer.num_heads
    if num_ranks == 1 or not mixer.use_output_norm:
        return
    from sglang.srt.distributed import tensor_model_parallel_all_reduce

    mixer.o_norm = make_norm(mixer.o_norm, mixer.rms_norm_eps, num_ranks, tensor_model_parallel_all_reduce)


def make_norm(norm: Any, eps: float, num_ranks: int, add_up: "Callable[[Tensor], Tensor]") -> Any:
    """Return a replacement of `norm` with the same weight, which carries SGLang's weight loader."""
    from torch import nn

    from sala.backends.torch.ops.dense import rms_norm_share

    class SharedNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = norm.weight

        def forward(self, x: "Tensor") -> "Tensor":
            return rms_norm_share(x, self.weight, eps, num_ranks, add_up)

    return SharedNorm()


def run_segments(
    original: "Callable[..., Tensor]",
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    s: "Tensor",
    decay_scales: "Tensor",
    meta: Any,
    caches: "Tensor | None" = None,
    cache_indices: "Tensor | None" = None,
    track_lens: "Tensor | None" = None,
    track_state_indices: "Tensor | None" = None,
    softmax_scale: float | None = None,
) -> "Tensor":
    """Wrap SGLang's kernel: q, k, v [T, H, D] packed, s [slots, H, D, D] advanced in place → [T, H, D].

    A negative slot is padding. The reference supports neither drafts nor cached states.
    """
    import torch

    from sala.backends.torch.ops.lightning import lightning_ragged

    if not q.is_cpu:
        wanted = (caches, cache_indices, track_lens, track_state_indices, softmax_scale)
        return original(q, k, v, s, decay_scales, meta, *wanted)
    if caches is not None or track_lens is not None or meta.mask is not None:
        raise NotImplementedError("speculation and a prefix cache of states need a GPU")
    lengths: list[int] = meta.q_offsets.diff().tolist()
    is_used = meta.s_offsets >= 0
    slots = meta.s_offsets.clamp(min=0).long()
    has_past = meta.s_scales.bool() & is_used
    states = torch.where(has_past[:, None, None, None], s[slots].float(), 0.0)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    total = sum(lengths)
    output, states = lightning_ragged(q[:total], k[:total], v[:total], states, lengths, decay_scales.flatten(), scale)
    s[slots[is_used]] = states[is_used].to(s.dtype)
    result = q.new_zeros(q.shape)
    result[:total] = output.to(q.dtype)
    return result
