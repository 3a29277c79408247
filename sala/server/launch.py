"""Start vLLM or SGLang instead of our own engine: its own server and command, with the flags that SALA needs.

A setting that cannot be passed on is an error, and so is a model that the engine cannot run or would compute wrongly.
"""

import importlib.util
import itertools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from sala.config import SalaConfig
from sala.errors import ConfigError, InputError, MissingExtra
from sala.models.catalog import embedded_folder, served_name
from sala.models.embedded import EMBEDDED, find_model
from sala.options.schema import flag_name, variable_name
from sala.options.sources import MASK
from sala.plugins import versions
from sala.plugins.vllm import PARSERS
from sala.server.settings import Settings, check_listening
from sala.text.tokenizer import find_template

COMMON = frozenset(
    {
        "allow_remote_without_key", "api_key", "api_key_file", "ctx", "device", "dtype", "engine", "host", "hub_hosts",
        "log_level", "master", "max_batch", "model", "models_dir", "node_rank", "nodes", "port", "tp",
    }
)  # fmt: skip
TAKEN = {  # settings that are passed on in addition to the common ones
    "vllm": frozenset({"alias", "pp", "cache_memory", "cors_origins"}),
    "sglang": frozenset({"admin_key", "max_queue"}),
}
FLAGS = {  # settings that are passed on unchanged if they are given; otherwise the engine's own defaults hold
    "vllm": {
        "ctx": "--max-model-len", "max_batch": "--max-num-seqs", "cache_memory": "--kv-cache-memory-bytes",
        "tp": "--tensor-parallel-size", "pp": "--pipeline-parallel-size",
    },
    "sglang": {
        "max_batch": "--max-running-requests", "max_queue": "--max-queued-requests", "log_level": "--log-level",
        "tp": "--tp-size",
    },
}  # fmt: skip
SUPPORTED = {"vllm": versions.VLLM, "sglang": versions.SGLANG}
# A schema holds from the first token, and JSON has no white space to spare: small models would fill answers with it.
STRUCTURED = {"enable_in_reasoning": True, "disable_any_whitespace": True, "backend": "xgrammar"}
SCALE = ("tp", "pp", "nodes", "node_rank", "master")
SPARSE_RATIO = 16  # query heads per KV head, the only ratio that SGLang's sparse kernels support
REMEDIES = {  # for settings that other engines do not take
    "adapter": "merge it into the model first: sala fuse MODEL --adapter ADAPTER -o DIR",
    "pp": "sglang cannot split SALA by layers; use --tp, or --engine vllm",
    "alias": "name one with -m: sglang calls a model by its directory",
    **dict.fromkeys(("temperature", "top_p", "top_k", "max_tokens"), "set it in the requests"),
}


@dataclass(frozen=True)
class LaunchCommand:
    """A command with its environment variables, secret variables, and secrets that it reads from a file."""

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    key_file: Mapping[str, str] = field(default_factory=dict, repr=False)

    def show(self) -> str:
        """Return the command as one would type it, with keys masked."""
        set_ = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        hidden = [f"{name}={MASK}" for name in self.secrets]
        file = ["--config", "KEYS.yaml"] if self.key_file else []
        return " ".join([*set_, *hidden, shlex.join([*self.command, *file])])

    def run(self) -> NoReturn:
        """Replace this process by the engine."""
        for name in ("api_key", "admin_key"):
            os.environ.pop(variable_name(name), None)
        os.environ.update({**self.variables, **self.secrets})
        command = list(self.command)
        if self.key_file:  # only we can read it; keys on a command line would be visible to other users
            handle, name = tempfile.mkstemp(prefix="sala-keys-", suffix=".yaml")
            with os.fdopen(handle, "w") as file:
                file.writelines(f"{key}: {json.dumps(value)}\n" for key, value in self.key_file.items())
            command += ["--config", name]
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(command[0], command)  # noqa: S606


def plan(
    settings: Settings, given: Collection[str], more: Sequence[str], environment: Mapping[str, str]
) -> LaunchCommand:
    """Return what to start. Checks all settings; `given` names those that are set, `more` are flags for the engine."""
    engine = settings.engine
    if more and not more[0].startswith("-"):
        raise InputError("arguments", f"{more[0][:60]} is not a flag", "name a model with -m")
    check_listening(settings)
    for name in sorted(given):
        if name not in COMMON | TAKEN[engine]:
            remedy = REMEDIES.get(name, "leave it out, or use --engine sala")
            raise InputError(flag_name(name), f"cannot be passed on to {engine}", remedy)
    _check_nodes(settings)
    if settings.port == 0:
        raise InputError("port", "is 0", f"choose one: {engine} does not report which port it took")
    path = _find_directory(settings)
    config = SalaConfig.load(path)
    _check_shares(config, settings)
    if engine == "vllm":
        launch = plan_vllm(settings, given, path)
        if not settings.node_rank:  # the machine that answers clients
            launch = replace(launch, command=(*launch.command, *_words(_choose_parsers(path, more))))
    else:
        launch = plan_sglang(settings, path, config, is_dense_in_sglang(settings, more, environment))
    flags = {flag: getattr(settings, name) for name, flag in FLAGS[engine].items() if name in given}
    launch = replace(launch, command=(*launch.command, *_words(flags)))
    _check_more(launch, more)
    if importlib.util.find_spec(engine) is None:
        raise MissingExtra(engine, engine)
    version = SUPPORTED[engine].installed()
    if version is not None:
        versions.check(SUPPORTED[engine], version)
    variable = f"{engine.upper()}_PLUGINS"  # both engines load all plug-ins unless it lists the permitted ones
    allowed = environment.get(variable, "").strip()
    if allowed and "sala" not in [name.strip() for name in allowed.split(",")]:
        raise InputError(variable, f"is {allowed[:60]!r}", "add sala to it: SALA runs there through its plug-in")
    return replace(launch, command=(*launch.command, *more))


def check_own(given: Collection[str], more: Sequence[str]) -> None:
    """Check that no setting or flag is meant for another engine: our own runs on one device."""
    scale = [name for name in SCALE if name in given]
    if scale:
        raise InputError(flag_name(scale[0]), "is for other engines", "add --engine vllm or --engine sglang")
    if more:
        remedy = "name a model with -m; flags after -- are for --engine vllm or sglang"
        raise InputError("arguments", f"{shlex.join(more)[:60]} are not understood", remedy)


def _find_directory(settings: Settings) -> Path:
    if settings.model is None and settings.engine == "sglang":
        raise InputError("--model", "is missing", "name a model: the embedded one has a shape that sglang cannot run")
    os.environ[variable_name("models_dir")] = str(settings.models_dir)
    path = find_model(settings.model).resolve()
    if not path.is_dir():
        raise InputError("model", f"{path} is a file", f"{settings.engine} needs a checkpoint directory")
    return path


def _check_nodes(settings: Settings) -> None:
    nodes, ranks = settings.nodes, settings.tp * settings.pp
    if nodes == 1:
        if settings.master is not None or settings.node_rank:
            name = "master" if settings.master is not None else "node_rank"
            raise InputError(flag_name(name), "is for several machines", "set their number with --nodes")
        return
    if settings.master is None:
        raise InputError("--master", "is missing", "give HOST:PORT of machine 0, where the machines meet")
    if settings.node_rank >= nodes:
        raise InputError("--node-rank", f"is {settings.node_rank}", f"it must be from 0 to {nodes - 1}")
    if ranks % nodes:
        problem = f"is {nodes}, and {ranks} GPUs cannot be spread evenly"
        raise InputError("--nodes", problem, "choose another --tp or --pp")


def _check_shares(config: SalaConfig, settings: Settings) -> None:
    tp, groups = settings.tp, config.num_key_value_heads
    counts = {name: getattr(config, name) for name in ("num_attention_heads", "lightning_nh", "intermediate_size")}
    fits = [n for n in range(1, 65) if not any(c % n for c in counts.values()) and not (groups % n and n % groups)]
    remedy = f"use {', '.join(map(str, fits))}"
    for name, count in counts.items():
        if count % tp:
            raise InputError("--tp", f"is {tp}, which does not divide {name} = {count}", remedy)
    if groups % tp and tp % groups:
        raise InputError("--tp", f"is {tp}, which cannot share {groups} KV heads evenly", remedy)
    if settings.pp > config.num_hidden_layers:
        raise InputError("--pp", f"is {settings.pp}", f"the model has {config.num_hidden_layers} layers")


def _check_more(launch: LaunchCommand, more: Sequence[str]) -> None:
    """Refuse flags that `sala serve` sets itself: a second value would bypass the checks."""
    ours = {word for word in launch.command if word.startswith("--")} - REPEATABLE | {"--config", *KEPT}
    for word in more:
        name = word.partition("=")[0].replace("_", "-")
        is_short_for_ours = name.startswith("--") and any(one.startswith(name) for one in ours)  # as argparse reads it
        if name in ours or is_short_for_ours:
            raise InputError(name, "is set by sala serve", "use its own flag, before the --")


def plan_vllm(settings: Settings, given: Collection[str], path: Path) -> LaunchCommand:
    """Return the command for vLLM. A node without a server needs `vllm serve`, which we run as a module."""
    if settings.device != "auto":
        remedy = "vllm uses the device it was built for; choose GPUs with CUDA_VISIBLE_DEVICES"
        raise InputError("--device", f"is {settings.device}", remedy)
    if settings.node_rank:
        start = ["-m", "vllm.entrypoints.cli.main", "serve", str(path), "--headless"]
    else:
        start = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
        start += ["--host", settings.host, "--port", str(settings.port)]
    name = EMBEDDED if path.name == embedded_folder() else served_name(path)
    start += ["--served-model-name", name, *settings.alias, "--dtype", settings.dtype]
    start += ["--enable-prefix-caching", "--enable-chunked-prefill"]
    if not settings.node_rank:
        start += ["--enable-auto-tool-choice", "--middleware", "sala.plugins.vllm.middleware.ClientMiddleware"]
    flags: dict[str, Any] = {}
    if settings.nodes > 1:
        host, _, port = str(settings.master).rpartition(":")
        flags |= {"--distributed-executor-backend": "mp", "--nnodes": settings.nodes}
        flags |= {"--node-rank": settings.node_rank, "--master-addr": host.strip("[]"), "--master-port": port}
    if settings.cors_origins:
        flags["--allowed-origins"] = json.dumps(settings.cors_origins)
    variables = {"VLLM_LOGGING_LEVEL": settings.log_level.upper()} if "log_level" in given else {}
    secrets = {} if settings.api_key is None else {"VLLM_API_KEY": settings.api_key}
    return LaunchCommand((sys.executable, *start, *_words(flags)), variables, secrets)


def _choose_parsers(path: Path, more: Sequence[str]) -> dict[str, str]:
    """Return the flags for tool calls and reasoning by the model's template, unless the user gives own ones.

    A schema holds from the first token, also where the model would have begun with reasoning: not every model reasons.
    """
    given = {word.partition("=")[0].replace("_", "-") for word in more}
    chosen: dict[str, str] = {}
    if "--tool-call-parser" not in given:
        chosen |= {"--tool-call-parser": "hermes" if "<tool_call>" in (find_template(path) or "") else PARSERS}
    if "--reasoning-parser" not in given:
        chosen |= {"--reasoning-parser": PARSERS}
        flag = "--structured-outputs-config"
        if not any(word.startswith(flag) for word in given):
            chosen |= {flag: json.dumps(STRUCTURED)}
        elif not any("enable_in_reasoning" in word for word in more):
            remedy = 'add "enable_in_reasoning": true to it, or name a --reasoning-parser'
            raise InputError(flag, "would leave answers without their schema", remedy)
    return chosen


def plan_sglang(settings: Settings, path: Path, config: SalaConfig, is_dense: bool) -> LaunchCommand:
    """Return the command for SGLang. On a CPU or with another attention backend it is dense: exact to `dense_len`."""
    if settings.device not in ("auto", "cpu", "cuda"):
        remedy = "use cpu or cuda; choose the GPU with CUDA_VISIBLE_DEVICES"
        raise InputError("--device", f"is {settings.device}", remedy)
    _check_sglang_model(config, path)
    is_cpu = settings.device == "cpu"
    start = ["-m", "sglang.launch_server", "--model-path", str(path), "--served-model-name", served_name(path)]
    start += ["--host", settings.host, "--port", str(settings.port), "--dtype", settings.dtype]
    flags: dict[str, Any] = {
        "--context-length": check_sglang_context(config, settings, is_dense),
        "--device": None if settings.device == "auto" else settings.device,
        "--attention-backend": "torch_native" if is_cpu else None,
        "--sampling-backend": "pytorch" if is_cpu else None,
    }
    if settings.nodes > 1:
        flags |= {"--nnodes": settings.nodes, "--node-rank": settings.node_rank, "--dist-init-addr": settings.master}
    keys = {"api-key": settings.api_key, "admin-api-key": settings.admin_key}
    held = {name: key for name, key in keys.items() if key is not None}
    return LaunchCommand((sys.executable, *start, *_words(flags)), key_file=held)


def _words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as words; those that are None are left out."""
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]


def is_dense_in_sglang(settings: Settings, more: Sequence[str], environment: Mapping[str, str]) -> bool:
    forced = environment.get("SGLANG_MINICPM_FORCE_DENSE", "").strip().lower() in ("1", "true", "yes", "on")
    words = [part for word in more for part in word.split("=", 1)]
    chosen = [value for name, value in itertools.pairwise(words) if name == "--attention-backend"]
    return forced or settings.device == "cpu" or any(not name.startswith("minicpm") for name in chosen)


def check_sglang_context(config: SalaConfig, settings: Settings, is_dense: bool) -> int | None:
    """Return the context to request; if all attention is dense, it must end before the model would become sparse."""
    sparse, ctx, tp = config.sparse_config, settings.ctx, settings.tp
    if is_dense:
        most = max(sparse.dense_len - 1, sparse.agreement_len)
        if ctx is not None and ctx > most:
            raise InputError("--ctx", f"is {ctx}", f"without sparse attention sglang is exact only up to {most} tokens")
        return most if ctx is None else ctx
    least = max(sparse.dense_len, sparse.block_size * sparse.topk)
    if ctx is not None and ctx < least:
        raise InputError("--ctx", f"is {ctx}", f"sglang's sparse attention needs at least {least}")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    ratio = heads // tp // max(1, groups // tp)
    if ratio != SPARSE_RATIO:
        fits_alone = heads // max(1, groups) == SPARSE_RATIO
        needs = f"sglang's sparse attention needs {SPARSE_RATIO}"
        problem = f"is {tp}, which gives {ratio} query heads per KV head, and {needs}"
        raise InputError("--tp", problem, "use --tp 1 or 2, or --engine vllm" if fits_alone else "use --engine vllm")
    return ctx


def _check_sglang_model(config: SalaConfig, path: Path) -> None:
    """Refuse models that SGLang cannot read, or would load but compute wrongly."""
    if config.quantization is not None and config.quantization.layout is None:
        command = shlex.join(["sala", "fuse", str(path), "--whole", "--dtype", "bfloat16", "-o", f"{path.name}-bf16"])
        raise ConfigError("sglang cannot read checkpoints that are quantized in MLX's layout", f"run: {command}")
    faults = {
        "attn_log_base": config.attn_log_base is not None,
        "attn_qk_norm": config.attn_qk_norm,
        "attention_bias": config.attention_bias,
        "mup_denominator": config.mup_denominator != config.num_hidden_layers,
        "lightning_nkv": config.lightning_nkv != config.lightning_nh,
    }
    for name, is_wrong in faults.items():
        if is_wrong:
            problem = f"sglang computes models with {name} = {getattr(config, name)} wrongly"
            raise ConfigError(problem, "use --engine vllm or --engine sala")


REPEATABLE = frozenset({"--middleware", "--enable-auto-tool-choice"})  # giving these again changes nothing of ours
# Flags, under all their names, that would change where an engine listens, who may call it and how it is distributed.
KEPT = frozenset(
    {
        "--api-key", "--admin-api-key", "--host", "--port", "--model", "--model-path", "--tensor-parallel-size", "-tp",
        "--tp", "--tp-size", "--pipeline-parallel-size", "-pp", "--pp", "--pp-size", "--nnodes", "-n", "--node-rank",
        "-r", "--master-addr", "--master-port", "--dist-init-addr", "--nccl-init-addr", "--headless", "--uds",
        "--context-length", "--max-model-len",
    }
)  # fmt: skip
