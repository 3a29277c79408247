"""`sala doctor`: what this machine has, what sala uses of it, and whether every kernel computes correct results."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sala.cli import flags as s
from sala.cli.outputs import print_facts, print_json, size
from sala.errors import ModelNotFound, SalaError, describe_error, free_disk_bytes, install_command
from sala.options import Options

if TYPE_CHECKING:
    import torch

    from sala.backends.torch.selftest import KernelCheck

PACKAGES = (
    *("torch", "triton", "mlx", "mlx-lm", "numpy", "tokenizers", "jinja2", "gguf", "llguidance", "accelerate"),
    "matplotlib",
)
LITTLE_MEMORY = 2 << 30
LITTLE_DISK = 1 << 30
USUAL_CTX = 8192  # tokens for which a model's memory is judged


@s.derived
def doctor(*, options: Annotated[Options, s.Use(only=("model",))], as_json: s.AsJson = False) -> None:
    import psutil

    from sala.lab.report.record import host, versions

    facts: dict[str, Any] = {"versions": versions(PACKAGES), "machine": host(), "places": places()}
    facts["machine"]["memory_free"] = int(psutil.virtual_memory().available)
    memory, disk = facts["machine"]["memory_free"], facts["places"]["disk_free"]
    warnings = []
    if memory < LITTLE_MEMORY:
        warnings.append(f"only {size(memory)} of memory are free: end other programs; sala estimate says what fits")
    if disk < LITTLE_DISK:
        warnings.append(f"only {size(disk)} of disk are free: set SALA_MODELS_DIR to a place with more")
    broken = "{} does not work ({}): install it again, pip install --force-reinstall {}"
    try:
        facts |= {"gpus": gpus(), "in_use": in_use()}
        warnings += _use_warnings(facts["in_use"], facts["gpus"])
    except Exception as error:  # a broken torch is a common reason to run this command
        facts |= {"gpus": [], "in_use": {}}
        warnings.append(broken.format("torch", describe_error(error), "torch"))
    try:
        facts["mlx"] = mlx()
        warnings += _mlx_warnings(facts["mlx"])
    except Exception as error:
        facts["mlx"] = None
        warnings.append(broken.format("MLX", describe_error(error), "mlx"))
    is_well = True
    if options.model and facts["in_use"]:
        try:
            facts["model"] = about(options.model)
            warnings += _model_warnings(facts["model"], facts["in_use"])
        except (SalaError, OSError) as error:
            warnings.append(" ".join(str(error).split()))
            is_well = False
    if not as_json:
        for title, rows in _sections(facts):
            print_facts(title, rows)
    facts["checks"] = [] if not facts["in_use"] else self_tests(is_shown=not as_json)
    facts["warnings"] = warnings
    if as_json:
        print_json(facts)
    else:
        for warning in warnings:
            s.write_out(f"warning: {warning}")
    if not is_well or not all(check["is_good"] for check in facts["checks"]):
        raise typer.Exit(1)


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that torch sees."""
    import torch

    from sala.backends.torch.kernels import triton_kernels

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        facts = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        found.append(
            {
                "name": facts.name,
                "compute_capability": f"{facts.major}.{facts.minor}",
                "memory": total,
                "memory_free": free,
                "kernels": triton_kernels.describe(device),
            }
        )
    return found


def in_use() -> dict[str, Any]:
    """Return the backend, device and kernels that a model gets by default."""
    import torch

    from sala.backends import pick_backend
    from sala.backends.torch.fast.dispatch import describe_cpu_linears
    from sala.backends.torch.kernels import native, triton_kernels
    from sala.backends.torch.loader import pick_device

    device = pick_device("auto")
    why_not = triton_kernels.why_not(device) if device.type == "cuda" else None
    on_cpu, found = describe_cpu_linears(), native.instructions()
    if found is not None:
        on_cpu += f", {found}; reads 4 and 8 bits, bf16, fp16 and fp32 as stored, computes in fp32"
    kernels = {"cpu": on_cpu, "cuda": triton_kernels.describe(device)}
    return {
        "backend": pick_backend("auto"),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "kernels": kernels.get(device.type, "none: PyTorch's own"),
        "cpu_kernels": on_cpu,
        "instructions": found,
        "has_native": native.load() is not None,
        "native": native.describe(),
        "cuda": torch.version.cuda,
        "no_triton": why_not,
        "warm": triton_kernels.warm_ups(),
    }


def mlx() -> dict[str, Any] | None:
    """Return facts about MLX where it is installed: device, memory limit of the GPU, verdicts on the Metal kernels."""
    from importlib.util import find_spec

    if find_spec("mlx") is None:
        return None
    import mlx.core as mx

    from sala.backends.mlx import selftest

    reason = selftest.why_not()
    return {
        "device": f"{mx.default_device().type.name}, {selftest.device_name()}",
        "gpu_limit": mx.device_info().get("max_recommended_working_set_size"),
        "no_kernels": reason,
        "kernels": {verdict.name: verdict.describe() for verdict in selftest.verdicts()},
    }


def places() -> dict[str, Any]:
    import platformdirs

    from sala.models.catalog import embedded_folder
    from sala.options.sources import models_dir

    where, folder = models_dir(), embedded_folder()
    embedded = None if folder is None else where / folder
    cache = platformdirs.user_cache_path("sala")
    return {
        "models": str(where),
        "cache": str(cache),
        "kernels": str(cache / "kernels"),
        "embedded": None if embedded is None else str(embedded),
        "is_embedded_ready": embedded is not None and embedded.is_dir(),
        "disk_free": free_disk_bytes(where) or 0,
    }


def about(model: str) -> dict[str, Any]:
    """Return the memory that a model needs here, without loading it. Raises CheckpointError for damaged weights."""
    from sala.backends.memory import ELEMENT_BYTES, estimate
    from sala.checkpoint.finite import check_finite
    from sala.checkpoint.names import count_parameters, expected_tensors
    from sala.checkpoint.reader import Checkpoint
    from sala.config import SalaConfig
    from sala.models.embedded import EMBEDDED

    if model == EMBEDDED and not places()["is_embedded_ready"]:  # looking for it would assemble it
        raise ModelNotFound(f"{EMBEDDED} is not assembled yet", "run: sala setup")
    path = s.find_model(model)
    config = SalaConfig.load(path)
    with Checkpoint(path) as checkpoint:
        check_finite(checkpoint)
        stored = checkpoint.nbytes
    parameters, element = count_parameters(expected_tensors(config)), ELEMENT_BYTES[config.dtype]
    needed = estimate(config, parameters, USUAL_CTX, element_bytes=element, stored_bytes=stored)
    return {
        "path": str(path),
        "dtype": config.dtype,
        "is_quantized": config.quantization is not None,
        "parameters": parameters,
        "weight_bytes": stored,
        "expanded_bytes": parameters * element,
        "needed_bytes": needed.total,
    }


def self_tests(is_shown: bool) -> list[dict[str, Any]]:
    """Check the kernels of the CPU and of the GPU in use; print each result at once."""
    from sala.backends.torch.loader import pick_device
    from sala.backends.torch.selftest import checks

    if is_shown:
        print("self-tests")
    found = []
    for device in dict.fromkeys((pick_device("cpu"), pick_device("auto"))):
        for check in _safely(checks, device):
            error = check.error if math.isfinite(check.error) else None  # JSON has no infinity
            facts = {"name": check.name, "error": error, "tolerance": check.tolerance, "is_good": check.is_good}
            found.append(facts | ({"message": check.message} if check.message else {}))
            if is_shown:
                verdict = "ok" if check.is_good else f"FAILED: {check.message or f'more than {check.tolerance:.0e}'}"
                print(f"  {check.name:<36} {'-' if error is None else f'{error:.1e}':>8}  {verdict}", flush=True)
    if is_shown and not found:
        print("  there are no kernels here to be tested")
    return found


def _safely(checks: Any, device: "torch.device") -> Iterable["KernelCheck"]:
    from sala.backends.torch.selftest import KernelCheck

    try:
        yield from checks(device)
    except Exception as error:
        yield KernelCheck(f"kernels of {device}", math.inf, 0.0, describe_error(error))


def _use_warnings(facts: dict[str, Any], gpus: list[dict[str, Any]]) -> Iterable[str]:
    import shutil

    if not facts["has_native"]:
        yield (
            f"{facts['native']}: on the CPU quantized models take the memory of full ones, and every model "
            "decodes without the native step; install g++ or clang++ (Debian: apt install g++; macOS: xcode-select "
            "--install)"
        )
    if facts.get("device", "").startswith("cuda") and not facts["no_triton"] and not facts["warm"]:
        yield "no kernels are compiled for this GPU yet: the first sala serve takes about a minute longer"
    if facts["no_triton"]:
        yield f"the GPU runs by PyTorch alone, without kernels: {facts['no_triton']}"
    if not gpus and shutil.which("nvidia-smi"):
        yield "there is an NVIDIA driver, but this torch sees no GPU: install a CUDA build of torch (pytorch.org)"


def _mlx_warnings(facts: dict[str, Any] | None) -> Iterable[str]:
    import platform

    if facts is None and platform.system() == "Darwin" and platform.machine() == "arm64":
        yield f"MLX is not installed, so models run on torch, which is much slower: {install_command('mlx')}"


def _model_warnings(facts: dict[str, Any], use: dict[str, Any]) -> Iterable[str]:
    from sala.backends.torch.executor import free_bytes
    from sala.backends.torch.loader import pick_device

    free = free_bytes(pick_device(use["device"]))
    if facts["needed_bytes"] > free:
        yield (
            f"{facts['path']} needs {size(facts['needed_bytes'])} with {USUAL_CTX:,} tokens and {size(free)} are free: "
            f"see sala estimate {facts['path']}"
        )


def _sections(facts: dict[str, Any]) -> Iterable[tuple[str, dict[str, str]]]:
    """Yield what is shown of the facts: titles and rows of names and values."""
    known = {name: version for name, version in facts["versions"].items() if version is not None}
    absent = ", ".join(name for name in facts["versions"] if name not in known)
    yield "versions", known | ({"not installed": absent} if absent else {})
    box, place, use = facts["machine"], facts["places"], facts["in_use"]
    rows = {
        "system": box["system"],
        "processor": f"{box['processor']}, {box['threads']} threads",
        "memory": f"{size(box['memory_free'])} of {size(box['memory'])} free",
    }
    for index, gpu in enumerate(facts["gpus"]):
        memory = f"{size(gpu['memory_free'])} of {size(gpu['memory'])} free"
        rows[f"GPU {index}"] = (
            f"{gpu['name']}, compute capability {gpu['compute_capability']}, {memory}; {gpu['kernels']}"
        )
    yield "machine", rows
    if use:
        shown = {"device": f"{use['device']}, {use['threads']} threads of the CPU", "kernels": use["kernels"]}
        if use["device"] != "cpu":
            shown["on the CPU"] = use["cpu_kernels"]
        if use["backend"] == "mlx" and facts["mlx"]:
            shown = {"device": facts["mlx"]["device"], **{f"torch: {name}": words for name, words in shown.items()}}
        yield "in use", {"backend": use["backend"], **shown}
    if use and use["warm"]:
        yield "warm", {one["model"]: f"on {one['gpu']}, in {one['seconds']:.0f} s" for one in use["warm"]}
    if facts["mlx"]:
        yield "mlx", _mlx_rows(facts["mlx"])
    yield (
        "places",
        {
            "models": place["models"],
            "disk": f"{size(place['disk_free'])} free",
            "cache": place["cache"],
            "kernels": place["kernels"],
            "smol-sala": "ready" if place["is_embedded_ready"] else "not assembled yet: sala setup",
        },
    )
    if "model" in facts:
        one = facts["model"]
        weights = f"{size(one['weight_bytes'])}, {'quantized' if one['is_quantized'] else one['dtype']}"
        needed = f"{size(one['needed_bytes'])} with {USUAL_CTX:,} tokens"
        yield "model", {"path": one["path"], "weights": weights, "needs": needed}


def _mlx_rows(facts: dict[str, Any]) -> dict[str, str]:
    rows = {"device": facts["device"]}
    if facts["gpu_limit"]:
        rows["GPU may hold"] = f"{size(facts['gpu_limit'])} (iogpu.wired_limit_mb; see sala estimate --macs)"
    if facts["no_kernels"]:
        rows["Metal kernels"] = f"none: {facts['no_kernels']}"
    verdicts: dict[str, str] = facts["kernels"]
    return rows | verdicts
