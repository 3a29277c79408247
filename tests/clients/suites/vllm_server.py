"""Plugin of pytest that points vLLM's entrypoint tests at a running `sala serve`.

It runs in the environment of those tests, so it imports nothing of this repository. vLLM and torch need not be
installed: their modules are stand-ins, since the cases that are kept only speak HTTP. What it adapts: the address, and
the vocabulary's size. Cases that cannot be carried over are left out below, each for a reason; all others must pass.
"""

import os
import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import openai
import pytest

ADDRESS = os.environ["SALA_ADDRESS"]
LEFT_OUT = {
    "adapters, with the requests of the base model": ("test_chat.py::.*\\[zephyr-lora\\]",),
    "code of vLLM, without a server": (
        "test_chat.py::test_chat_completion_request_",
        "test_completion.py::test_completion_request_",
        "test_completion.py::test_echo_logprob_completion",
    ),
    "fields and endpoints of vLLM": (
        "test_chat.py::test_(structured_outputs|.*prompt_logprobs|chat_completion_stream_options|invocations)",
        "test_chat_echo.py::",
        "test_completion.py::test_(completion_truncation|logprob_token_ids|prompt_logprobs|completion_stream_options)",
        "test_completion.py::test_(batch_completions|invalid_)",
        "test_simple.py::test_enable_response_messages",
        "test_completion_with_function_calling.py::test_function_tool_use\\[True-",
    ),
    "an answer under way is called queued there": ("test_stateful.py::test_background$",),
    "wording of vLLM": (
        "test_chat.py::test_long_seed",
        "test_stateful.py::test_(store|background_error|cancel_completed)$",
    ),
    "the last chunk has no text and the content of a call is null, as OpenAI's": (
        "test_chat.py::test_chat_streaming\\[Hugging",
        "test_completion_with_function_calling.py::test_named_tool_use",
    ),
    "accepted here and refused there, or the other way round": ("test_chat.py::test_custom_role",),
    "an unfinished call is an incomplete item": ("test_function_call.py::test_max_tokens_with_tool_choice_required",),
    "client no longer has this argument": ("test_messages.py::test_anthropic_streaming_cache_usage",),
    "answers of larger models, their lengths and tokens": (
        "test_chat.py::test_(single_chat_session|response_format_json|complex_message_content)",
        "test_completion.py::test_(single_completion|completion_streaming|parallel)",
        "test_basic.py::test_(simple_input|instructions|chat$)",
        "test_simple.py::test_(basic|reasoning_item|streaming_reasoning_tokens|non_streaming_reasoning_tokens)",
        "test_stateful.py::test_(previous_response_id|two_responses)",
        "test_structured_output.py::",
        "test_function_call.py::test_(named_tool_use|function_tool_use)",
        "test_function_call.py::test_function_calling_with_streaming_(expected|forced_tool_choice\\[(auto|tool_choice2))",
        "test_function_call.py::test_function_calling_with_streaming_types\\[(True|False)-required",
        "test_messages.py::test_(simple_messages|system_message|anthropic_tool_call$)",
        "test_completion_with_function_calling.py::test_function_tool_use\\[False-auto",
    ),
}


class StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class StandIns(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ("vllm", "torch") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "vllm.config":
            module.ModelConfig = Config


class Config:
    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return int(os.environ["SALA_VOCABULARY"])


class RemoteOpenAIServer:
    """Theirs starts a server; this one is running already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join((ADDRESS, *parts))

    def get_client(self, **given: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": self.url_for("v1"), "api_key": "none", "max_retries": 0, **given})

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**{"base_url": self.url_for("v1"), "api_key": "none", "max_retries": 0, **given})

    def get_async_client_anthropic(self, **given: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**{"base_url": ADDRESS, "api_key": "none", "max_retries": 0, **given})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    patterns = {pattern: re.compile(pattern) for patterns in LEFT_OUT.values() for pattern in patterns}
    met: set[str] = set()
    kept, dropped = [], []
    for item in items:
        name = f"{item.path.name}::{item.name}"
        found = {pattern for pattern, compiled in patterns.items() if compiled.match(name)}
        met |= found
        (dropped if found else kept).append(item)
    if len(patterns) > len(met):
        raise pytest.UsageError(f"no case has these names: {sorted(patterns.keys() - met)}")
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


sys.meta_path.insert(0, StandIns())
utils = ModuleType("tests.utils")
utils.RemoteOpenAIServer, utils.ROCM_EXTRA_ARGS = RemoteOpenAIServer, []
sys.modules["tests.utils"] = utils
