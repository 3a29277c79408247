"""What the installation needs is declared, the install commands in the documentation exist, and the pins resolve."""

import ast
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Distributions of modules, for those that need not be installed here.
DISTRIBUTIONS = {
    "bitsandbytes": "bitsandbytes", "datasets": "datasets", "deepspeed": "deepspeed", "fla": "flash-linear-attention",
    "llamafactory": "llamafactory", "lm_eval": "lm-eval", "mlx": "mlx", "mlx_lm": "mlx-lm", "pynvml": "nvidia-ml-py",
    "pydantic_core": "pydantic", "sglang": "sglang", "triton": "triton", "trl": "trl", "vllm": "vllm",
}  # fmt: skip
# Extras that a package may import at module level; everything else does with the base.
MAY_IMPORT = {
    "sala/server": ("server",),
    "sala/lab": ("train", "eval"),
    "sala/lab/train/halo/row_attention.py": ("cuda",),
    "sala/backends/mlx": ("mlx",),
    "sala/backends/torch/kernels": ("cuda",),
    "sala/plugins/transformers": ("train",),
    "sala/plugins/vllm": ("vllm", "train"),
    "sala/plugins/sglang.py": ("sglang",),
    "sala/plugins/mlx_lm.py": ("mlx",),
}
BY_HAND = {"bitsandbytes", "deepspeed", "llamafactory", "mlx-lm"}  # the guides say when and how to install them
INDEPENDENT = ("server", "train", "eval", "dev", "cuda", "mlx")  # extras that share constraints.txt
ELSEWHERE = {
    "anthropic", "langchain-openai", "litellm", "llamafactory==0.9.5", "llm", "lm-eval[api]", "mcp", "mlx-lm",
    "openai", "transformers", "bitsandbytes", "deepspeed",
}  # fmt: skip


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", name)[0]).lower()


BASE = {normal(item) for item in PROJECT["dependencies"]}
DECLARED = {extra: {normal(item) for item in items} for extra, items in EXTRAS.items()}


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield every third-party module that a file imports, and whether that happens at module level."""
    tree = ast.parse(file.read_text())
    top = set()
    for node in tree.body:
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_typing:
            top |= set(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"sala"}:
            yield name, node in top


def test_every_import_is_declared() -> None:
    installed = packages_distributions()
    everything = BASE.union(*(DECLARED[extra] for extra in EXTRAS if extra != "dev"))
    for file in sorted((ROOT / "sala").rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        allowed = BASE.union(*(DECLARED[e] for path, es in MAY_IMPORT.items() if place.startswith(path) for e in es))
        for module, is_top in imports(file):
            names = {normal(name) for name in installed.get(module, [DISTRIBUTIONS.get(module, module)])}
            names |= {normal(DISTRIBUTIONS.get(module, module))}
            assert names & (everything | BY_HAND), f"{place} imports {module}, which pyproject.toml does not declare"
            if is_top:
                assert names & allowed, f"{place} imports {module} at module level; only an extra installs it"


def commands() -> Iterator[tuple[Path, str]]:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    files += [
        file for file in (ROOT / "examples").rglob("*") if file.suffix in ("", ".service", ".md", ".toml", ".yaml")
    ]
    for file in files:
        if file.is_file():
            for match in re.finditer(r"pip3? install ([^\n`#&;)]+)", file.read_text()):
                yield file, match[1].strip()


def test_install_lines_name_this_checkout_or_packages_that_exist() -> None:
    found = list(commands())
    assert len(found) > 10
    for file, line in found:
        words = [word.strip("'\"") for word in line.split()]
        while words:
            word = words.pop(0)
            if word in ("-c", "--constraint"):
                assert words.pop(0).endswith("constraints.txt"), (file, line)
            elif word.startswith("-"):
                continue
            elif match := re.fullmatch(r"(?:\.|/src|/path/to/sala)(?:\[([\w,]+)\])?", word):
                extras = match[1].split(",") if match[1] else []
                assert set(extras) <= set(EXTRAS), f"{file.name}: {line} names an extra that does not exist"
                is_pinned = "constraints.txt" in line
                assert not (is_pinned and {"vllm", "sglang"} & set(extras)), f"{file.name}: {line} cannot be resolved"
            else:
                assert word in ELSEWHERE, f"{file.name}: {line} names {word}"


def test_the_package_is_typed() -> None:
    assert (ROOT / "sala" / "py.typed").is_file()


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {normal(line): line for line in lines if line and not line.startswith("#")}
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line) for line in pins.values())
    for extra in ("base", *INDEPENDENT):
        wanted = BASE if extra == "base" else DECLARED[extra]
        assert wanted <= set(pins), f"{extra}: {sorted(wanted - set(pins))} are not in constraints.txt"


def test_every_extra_resolves_on_the_public_index() -> None:
    """With pip alone, no further sources, metadata only. vLLM and SGLang pin other versions: `make resolve-engines`."""
    if int(version("pip").partition(".")[0]) < 25:
        pytest.skip("pip 25 or newer is needed to resolve from metadata alone")
    try:
        socket.create_connection(("pypi.org", 443), 5).close()
    except OSError:
        pytest.skip("no package index answers at pypi.org")
    wanted = f"{ROOT}[{','.join(INDEPENDENT)}]"
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--use-feature=fast-deps", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), wanted]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=540)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index is too slow to resolve within nine minutes")
    if out.returncode and re.search(
        "ConnectionError|ReadTimeout|Max retries|HTTP error 5|Temporary failure", out.stderr
    ):
        pytest.skip(f"the package index does not answer: {out.stderr.strip().splitlines()[-1][:200]}")
    assert out.returncode == 0, out.stderr[-3000:]
