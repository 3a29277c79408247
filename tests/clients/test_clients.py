"""Unchanged clients against the server: their own ways of asking, their own reading of the answers.

With SALA_TEST_CLIENTS versions and outcomes are written to `benchmarks/foreign_suites.json`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import Environment
from tests.clients.results import recorded

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
TASKS = HERE / "tasks"
MODEL = "smol-sala"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
Install = Callable[..., Environment]
PYTHON = {
    "openai_chat": ["openai"],
    "openai_responses": ["openai"],
    "anthropic_messages": ["anthropic"],
    "langchain_chat": ["langchain-openai"],
    "litellm_completion": ["litellm", "mcp"],  # without mcp litellm 1.106 cannot be given tools
    "llm_tools": ["llm"],
    "instructor_models": ["instructor"],
    "pydantic_ai_agent": ["pydantic-ai-slim[openai]"],
    "openai_agents_run": ["openai-agents"],
}
NODE = {
    "openai_node": ["openai"],
    "anthropic_node": ["@anthropic-ai/sdk"],
    "ai_sdk": ["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"],
}


@pytest.mark.parametrize("program", PYTHON)
def test_python(program: str, install: Install, address: str, tmp_path: Path) -> None:
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LLM_USER_PATH": str(tmp_path)}
    environment = install(*PYTHON[program])
    with recorded(program, environment.versions(PYTHON[program])):
        environment.run("python", str(PROGRAMS / f"{program}.py"), address, MODEL, **local)


@pytest.mark.parametrize("program", NODE)
def test_node(program: str, install_node: Install, address: str) -> None:
    environment = install_node(*NODE[program])
    copy = environment.folder / f"{program}.mjs"  # node looks for packages beside the program
    copy.write_text((PROGRAMS / f"{program}.mjs").read_text())
    with recorded(program, environment.versions(NODE[program])):
        environment.run("node", str(copy), address, MODEL)


def test_llm(install: Install, address: str, tmp_path: Path) -> None:
    """The command llm, told by its file of models."""
    known = f"- model_id: sala\n  model_name: {MODEL}\n  api_base: {address}/v1\n  supports_schema: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(known)
    here = {"LLM_USER_PATH": str(tmp_path)}
    environment = install("llm")
    ask = ("llm", "-m", "sala", "-o", "temperature", "0", "-o", "max_tokens", "32", "What is the capital of France?")
    with recorded("llm", environment.versions(["llm"])):
        streamed = environment.run(*ask, **here)
        assert streamed.strip()
        assert environment.run(*ask, "--no-stream", **here) == streamed
        assert set(json.loads(environment.run(*ask, "--schema", json.dumps(CITY), **here))) == {"city"}


def test_lm_eval(install: Install, address: str, tmp_path: Path) -> None:
    """Likelihoods and generation; the tokenizer is the server's own."""
    environment = install("lm-eval[api]")
    with recorded("lm_eval", environment.versions(["lm-eval"])):
        environment.run(
            "lm_eval", "--model", "local-completions",
            "--model_args", f"model={MODEL},base_url={address}/v1/completions,num_concurrent=2,max_retries=1",
            "--include_path", str(TASKS), "--tasks", "sala_choose,sala_generate", "--output_path", str(tmp_path),
            folder=TASKS, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1",
        )  # fmt: skip
        results = json.loads(next(tmp_path.glob("**/results_*.json")).read_text())["results"]
        assert results["sala_choose"]["acc,none"] == 1
        assert "exact_match,none" in results["sala_generate"]
