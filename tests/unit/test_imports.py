"""Importing is free, and the package holds no door to foreign code."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import sala

HEAVY = ("torch", "mlx", "triton", "transformers", "fastapi", "numpy", "jinja2", "tokenizers", "prompt_toolkit")
PACKAGE = Path(sala.__file__).parent


@pytest.mark.parametrize(
    "code",
    [
        "import sala",
        "import sala; dir(sala); sala.Sampling; sala.SalaConfig",
        "from sala.cli import run; run(['--help'])",
        "from sala.cli import run; run(['generate', '--help'])",
        "from sala.cli import run; run(['chat', '--help'])",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    check = f"{code}\nimport sys\nprint('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "LOADED []" in out.stdout


def test_importing_changes_nothing() -> None:
    """No import hook, no path, no warning filter, no environment variable, and only the standard library and sala."""
    code = """
import os, sys, warnings
def state(): return sys.meta_path[:], sys.path[:], sys.path_hooks[:], dict(os.environ), warnings.filters[:]
before, loaded = state(), set(sys.modules)
import sala
assert state() == before
new = {name.partition('.')[0] for name in set(sys.modules) - loaded}
assert not new - set(sys.stdlib_module_names) - {'sala'}, new
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Imports for type checkers alone, and those inside functions, count too."""
    graph = grimp.build_graph("sala", cache_dir=None)
    assert len(graph.modules) > 300
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # a CycleError names the modules


def test_every_public_name_is_there() -> None:
    for name in sala.__all__:
        assert getattr(sala, name) is not None
    with pytest.raises(AttributeError):
        sala.nothing  # noqa: B018


FORBIDDEN = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_pickle_no_eval(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not FORBIDDEN & {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in {"eval", "exec", "torch.load", "os.system"}
            assert not any(keyword.arg == "shell" for keyword in node.keywords)
