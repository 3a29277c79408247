"""The plug-in for SGLang as far as it can be tried without SGLang, which does not install on a machine without a GPU.

`test_sglang_engine.py` runs SGLang itself.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sala.backends.torch.ops.dense import rms_norm
from sala.backends.torch.ops.lightning import decay_slopes, lightning_step
from sala.plugins.sglang import Norm, make_norm, read_norm, run_segments

# What the hook looks at, in the shape that SGLang 0.5.23 gives it.
SOURCE = """
class MiniCPMLightningMixer(nn.Module):
    def __init__(self, num_heads, head_dim):
        if self.use_output_norm:
            self.o_norm = RMSNorm(self.num_heads * self.head_dim, eps=self.rms_norm_eps)

    def forward(self, o):
        if self.use_output_norm:
            o = self.o_norm(o)
        return self.o_proj(o)
"""
USE = "o = self.o_norm(o)"


def test_the_fault_is_recognised() -> None:
    assert read_norm(SOURCE) is Norm.PER_RANK
    assert read_norm("class Other:\n    pass\n") is Norm.ABSENT
    assert read_norm("") is Norm.ABSENT


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (USE, "o = self.o_norm(o, tensor_model_parallel_all_reduce)"),
        (USE, "o = normalize_over_ranks(o, self.o_norm.weight, self.rms_norm_eps)"),
        (USE, "o = self.o_norm(o) if self.tp_size == 1 else normalize_over_ranks(o, self.o_norm)"),
        (USE, "o = self.o_norm(o)\n            o = self.o_norm(o)"),
        (USE, "o = self.o_norm(self.all_gather(o))"),
        ("RMSNorm(", "RMSNormTP("),
        ("self.num_heads *", "self.total_num_heads *"),
        ("def forward", "def run"),
    ],
)
def test_whatever_else_it_does_is_left_alone(old: str, new: str) -> None:
    assert old in SOURCE
    assert read_norm(SOURCE.replace(old, new)) is Norm.OTHER


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_over_all_ranks(dtype: torch.dtype) -> None:
    """The shares of two ranks together are the norm of the whole; each rank alone is something else."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 32).to(dtype), torch.rand(32).to(dtype)
    x[:, 16:] *= 10
    squares = x.float().square().sum(-1, keepdim=True)
    shares = []
    for part, share in zip(x.split(16, -1), weight.split(16), strict=True):

        def add_up(own: torch.Tensor, part: torch.Tensor = part) -> torch.Tensor:
            assert own.dtype == torch.float32
            torch.testing.assert_close(own, part.float().square().sum(-1, keepdim=True))
            return squares

        parameter = torch.nn.Parameter(share)
        norm = make_norm(SimpleNamespace(weight=parameter), 1e-6, 2, add_up)
        assert norm.weight is parameter  # its loader comes with it
        assert dict(norm.named_parameters()).keys() == {"weight"}
        shares.append(norm(part).detach())
    whole = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(torch.cat(shares, -1), whole)
    alone = rms_norm(x[:, :16], weight[:16], 1e-6)
    assert not torch.allclose(alone.float(), whole[:, :16].float(), rtol=0.1)


def make_meta(lengths: list[int], slots: list[int], has_past: list[bool]) -> SimpleNamespace:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return SimpleNamespace(
        batch_size=len(lengths), q_offsets=offsets, s_offsets=torch.tensor(slots, dtype=torch.int32),
        s_scales=torch.tensor(has_past), mask=None,
    )  # fmt: skip


def no_kernel(*_: object) -> torch.Tensor:
    raise AssertionError("there is no GPU")


def test_segments_without_a_gpu() -> None:
    """A new prompt in a used slot, a continued one, a decoded token and padding, against the recurrence itself."""
    torch.manual_seed(1)
    lengths, slots, has_past, heads, dim = [70, 3, 1, 1], [2, 0, 3, -1], [False, True, True, True], 4, 8
    q, k, v = torch.randn(3, sum(lengths), heads, dim)
    states = torch.randn(5, heads, dim, dim)
    states[2] = torch.nan  # what the slot held before is nothing to the new one
    before, slopes = states.clone(), decay_slopes(heads)
    decay = slopes.reshape(heads, 1, 1)
    output = run_segments(no_kernel, q, k, v, states, decay, make_meta(lengths, slots, has_past), softmax_scale=0.5)
    begin = 0
    for length, slot, continues in zip(lengths[:3], slots, has_past, strict=False):
        state = before[slot : slot + 1] if continues else torch.zeros(1, heads, dim, dim)
        for row in range(begin, begin + length):
            step = slice(row, row + 1)
            wanted, state = lightning_step(q[step], k[step], v[step], state, slopes, 0.5)
            torch.testing.assert_close(output[step], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[slot : slot + 1], state, rtol=1e-4, atol=1e-4)
        begin += length
    for slot in (1, 4):  # nobody's
        assert torch.equal(states[slot], before[slot])


def test_segments_elsewhere_are_the_kernels() -> None:
    q = torch.empty(1, 2, 8, device="meta")
    meta = make_meta([1], [0], [True])
    given = []
    answer = torch.empty(0)

    def kernel(*arguments: object) -> torch.Tensor:
        given.extend(arguments)
        return answer

    assert run_segments(kernel, q, q, q, q, q, meta, track_lens=q, softmax_scale=2.0) is answer
    assert given[5:] == [meta, None, None, q, None, 2.0]
    with pytest.raises(NotImplementedError, match="need a GPU"):
        run_segments(no_kernel, *(torch.zeros(1, 2, 8),) * 5, meta, track_lens=torch.ones(1))


REGISTRY = """
import enum
class HookType(enum.Enum):
    AROUND = "around"
    AFTER = "after"
class HookRegistry:
    @staticmethod
    def register(target, hook, kind):
        print("HOOK", target, hook.__name__, kind.name)
"""
CONFIG = """
from transformers import PretrainedConfig
class MiniCPMHybridConfig(PretrainedConfig):
    model_type = "minicpm_sala"
"""
REGISTER = """
import sys
from pathlib import Path
place, repaired = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(place))
import torch, transformers
torch.cuda.is_available = lambda: False
import sala
from sala.plugins.sglang import register
register(); register()
print("CONFIG", transformers.AutoConfig.for_model("minicpm_sala").__class__.__module__)
torch.cuda.is_available = lambda: True
model = place / "sglang" / "srt" / "models" / "minicpm.py"
model.write_text(repaired)
register.cache_clear(); register()
torch.cuda.is_available = lambda: False
model.unlink()  # a version without the model
register.cache_clear(); register()
print("END")
"""


def test_register(tmp_path: Path) -> None:
    """In a process of its own: what is hooked where, and that SGLang's configuration keeps the model's name."""
    files = {"plugins/hook_registry.py": REGISTRY, "configs/minicpm.py": CONFIG, "models/minicpm.py": SOURCE}
    for name, text in files.items():
        file = tmp_path / "sglang" / "srt" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    command = [sys.executable, "-c", REGISTER, str(tmp_path), SOURCE.replace("RMSNorm", "RMSNormTP")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    flags = "HOOK sglang.srt.server_args.ServerArgs.add_cli_args add_flags AFTER"
    assert out.splitlines() == [
        flags,
        "HOOK sglang.srt.models.minicpm.MiniCPMLightningMixer.__init__ build_mixer AROUND",
        "HOOK sglang.kernels.ops.attention.linear.seg_la.seg_la_fwd run_segments AROUND",
        "CONFIG sglang.srt.configs.minicpm",
        flags,
        "END",
    ]
