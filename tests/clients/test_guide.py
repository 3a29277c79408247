"""The snippets of the guide, as they stand there."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import Environment

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"
TASKS = Path(__file__).parent / "tasks"
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"`(pip|npm) install ([^`]+)`")
RUN = {"python": ("python", "-c"), "sh": ("sh", "-ec"), "js": ("node", "--input-type=module", "-e")}


def snippets() -> list[tuple[str, list[str], str, str]]:
    """Installer, packages, language and text of each."""
    out = []
    for _, section in SECTION.findall(GUIDE.read_text()):
        wanted = INSTALL.search(section)
        if wanted is not None:
            packages = wanted[2].replace("'", "").split()
            out += [(wanted[1], packages, language, text) for language, text in BLOCK.findall(section)]
    return out


@pytest.mark.parametrize(
    ("installer", "packages", "language", "text"), snippets(), ids=lambda one: one[0] if isinstance(one, list) else ""
)
def test_snippet(
    installer: str,
    packages: list[str],
    language: str,
    text: str,
    install: Callable[..., Environment],
    install_node: Callable[..., Environment],
    address: str,
    tmp_path: Path,
) -> None:
    environment = (install if installer == "pip" else install_node)(*packages)
    here = {"LLM_USER_PATH": str(tmp_path), "HF_HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    folder = TASKS if packages[0].startswith("lm-eval") else environment.folder
    said = environment.run(*RUN[language], text.replace("http://127.0.0.1:8080", address), folder=folder, **here)
    assert said.strip()
