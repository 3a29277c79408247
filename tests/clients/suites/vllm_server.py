"""Plugin of pytest that points vLLM's entrypoint tests at a running `sala serve`.

It runs in the environment of those tests, so it imports nothing of this repository. vLLM and torch need not be
installed: their modules are stand-ins, since the cases that are kept only speak HTTP. What it adapts:

- the address, the size of the vocabulary and the range of an integer
- `echo: false` in a chat, which asks for nothing
- answers in JSON that only larger models know: the schema prescribes the values, so that what is tested is that it
  is enforced
- wording of errors, to which vLLM's is added; an answer under way is called queued while it is waited
  for

Cases that cannot be carried over are left out in `LEFT_OUT`, each for a reason; all others must pass.
"""

import json
import os
import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx2 as httpx  # of the client
import openai
import pytest
from left_out import sort_out

ADDRESS = os.environ["SALA_ADDRESS"]
LEFT_OUT = {
    "adapters of vLLM's own, with the requests of the base model": ("test_chat.py::.*\\[zephyr-lora\\]",),
    "code of vLLM, without a server": (
        "test_chat.py::test_chat_completion_request_",
        "test_completion.py::test_completion_request_",
        "test_completion.py::test_echo_logprob_completion",
    ),
    "the field structured_outputs (here: response_format)": (
        "test_chat.py::test_structured_outputs",
        "test_completion.py::test_invalid_",
    ),
    "the field prompt_logprobs (here: echo with logprobs, in completions)": (
        "test_chat.py::test_.*prompt_logprobs",
        "test_chat_echo.py::test_prompt_logprobs",
        "test_completion.py::test_prompt_logprobs",
    ),
    "log-probabilities of the whole vocabulary, or of tokens that are named": (
        "test_chat_echo.py::test_top_logprobs",
        "test_completion.py::test_logprob_token_ids",
    ),
    "the prompt repeated in the answer of a chat (echo)": ("test_chat_echo.py::test_chat_session_.*\\[test_case0\\]",),
    "usage with every chunk": ("test_(chat|completion).py::test_(chat_)?completion_stream_options",),
    "the endpoint /invocations": ("test_chat.py::test_invocations",),
    "beam search, prompts cut to fit, ids of tokens and rendered messages with the answer": (
        "test_completion.py::test_(batch_completions|completion_truncation)",
        "test_simple.py::test_enable_response_messages",
    ),
    "reasoning is called reasoning_content": (
        "test_completion_with_function_calling.py::test_function_tool_use\\[True-",
    ),
    "the last chunk has no text, as OpenAI's": (
        "test_chat.py::test_chat_streaming\\[Hugging",
        "test_completion.py::test_completion_streaming",
    ),
    "the content of a call is null, as OpenAI's": ("test_completion_with_function_calling.py::test_named_tool_use",),
    "the usage names cached and reasoning tokens, as OpenAI's": ("test_chat.py::test_single_chat_session",),
    "roles of one's own are refused": ("test_chat.py::test_custom_role",),
    "an unfinished call is an incomplete item": ("test_function_call.py::test_max_tokens_with_tool_choice_required",),
    "its client no longer has this argument": ("test_messages.py::test_anthropic_streaming_cache_usage",),
    "numbers of tokens of another tokenizer, and lengths of another model's samples": (
        "test_completion.py::test_(single_completion|parallel)",
    ),
    "what only a larger model knows or remembers": (
        "test_chat.py::test_(response_format_json_schema|complex_message_content)",
        "test_basic.py::test_(simple_input|instructions|chat$)",
        "test_stateful.py::test_(previous_response_id|two_responses)",
    ),
    "reasoning by a model that always reasons": (
        "test_simple.py::test_(reasoning_item|streaming_reasoning_tokens|non_streaming_reasoning_tokens)",
    ),
    "calls that only a larger model chooses to make": (
        "test_function_call.py::test_function_tool_use\\[auto",
        "test_function_call.py::test_function_calling_with_streaming_(expected|forced_tool_choice\\[auto)",
        "test_messages.py::test_anthropic_tool_call$",
        "test_completion_with_function_calling.py::test_function_tool_use\\[False-auto",
    ),
    "calls and answers that a small model does not end within its tokens": (
        "test_function_call.py::test_named_tool_use",
        "test_function_call.py::test_function_calling_with_streaming_types\\[(True|False)-required",
        "test_messages.py::test_simple_messages",
    ),
}
KNOWN = {"event_name": "Science Fair", "date": "Friday", "participants": ["Alice", "Bob"]}
WORDS = {
    "seed: Input should be (greater|less) than or equal": "{}_than_equal",
    "no response with that id": "Response with id ... not found.",
    "background: needs the response to be stored": "background can only be used when `store` is true",
    "only responses that were created with background can be cancelled": "Cannot cancel a synchronous response.",
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
        if module.__name__ == "torch":
            module.iinfo = lambda _: SimpleNamespace(min=-(2**63), max=2**63 - 1)


class Config:
    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return int(os.environ["SALA_VOCABULARY"])


class Adapted(httpx.AsyncBaseTransport):
    """Sends what is adapted, and hands on what is adapted."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        if content:
            content = json.dumps(asked(json.loads(content))).encode()
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        more = {"headers": headers, "content": content, "extensions": request.extensions}
        answer = await self._inner.handle_async_request(httpx.Request(request.method, request.url, **more))
        if answer.headers.get("content-type") != "application/json":
            return answer
        body = answered(json.loads(await answer.aread()))
        await answer.aclose()
        return httpx.Response(answer.status_code, json=body)

    async def aclose(self) -> None:
        await self._inner.aclose()


def asked(body: Any) -> Any:
    if body.get("echo") is False:
        del body["echo"]
    properties = body.get("text", {}).get("format", {}).get("schema", {}).get("properties", {})
    properties.update({name: {"const": KNOWN[name]} for name in properties.keys() & KNOWN})
    return body


def answered(body: Any) -> Any:
    if isinstance(error := body.get("error"), dict):
        for pattern, words in WORDS.items():
            if found := re.search(pattern, error["message"]):
                error["message"] += f" ({words.format(*found.groups())})"
    if body.get("status") == "in_progress" and "::test_background " in os.environ["PYTEST_CURRENT_TEST"]:
        body["status"] = "queued"
    return body


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
        more = {"api_key": "none", "max_retries": 0, "http_client": httpx.AsyncClient(transport=Adapted(), timeout=600)}
        return openai.AsyncOpenAI(**{"base_url": self.url_for("v1"), **more, **given})

    def get_async_client_anthropic(self, **given: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**{"base_url": ADDRESS, "api_key": "none", "max_retries": 0, **given})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sort_out(config, items, LEFT_OUT)


sys.meta_path.insert(0, StandIns())
utils = ModuleType("tests.utils")
utils.RemoteOpenAIServer, utils.ROCM_EXTRA_ARGS = RemoteOpenAIServer, []
sys.modules["tests.utils"] = utils
