"""Plugin of pytest that points llama.cpp's server tests at a running `sala serve`.

It runs in the environment of those tests, so it imports nothing of this repository. What it adapts: the address, the
model's name, the numbers and words that only the model of those tests can give, hints that are llama.cpp's own, the
null in a first delta, and `/completion`, which is asked as `/v1/completions`. Cases that cannot be carried over are
left out below, each for a reason; all others must pass.
"""

import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import utils  # of llama.cpp's tests

Json = dict[str, Any]
MODEL = os.environ["SALA_MODEL"]
FILES = {
    "test_basic.py", "test_chat_completion.py", "test_compat_anthropic.py", "test_compat_oai_responses.py",
    "test_completion.py", "test_security.py", "test_tokenize.py", "test_tool_call.py",
}  # fmt: skip
LEFT_OUT = {
    "endpoints of llama.cpp": (
        "test_basic.py::test_server_(props|slots)",
        "test_chat_completion.py::test_apply_chat_template",
        "test_compat_anthropic.py::test_anthropic_thinking_history_in_template",
        "test_completion.py::test_cancel_request",
        "test_security.py::test_cors_proxy",
    ),
    "fields of llama.cpp, in requests or answers": (
        "test_basic.py::test_server_model_aliases_and_tags",
        "test_chat_completion.py::test_chat_template(_assistant_prefill|_continue_final_message_vllm_compat)?(\\[|$)",
        "test_chat_completion.py::test_completion_with_(json_schema|grammar|invalid_grammar)",
        "test_chat_completion.py::test_completion_with_response_format\\[response_format[01567]-",
        "test_chat_completion.py::test_verbose_debug",
        "test_chat_completion.py::test_context_size_exceeded",
        "test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry",
        "test_completion.py::test_completion(_stream|_response_fields|_prompt_cache|_with_tokens_input)?(\\[|$)",
        "test_completion.py::test_json_prompt",
        "test_completion.py::test_n_probs",
        "test_completion.py::test_logit_bias\\[(False|True-False|False-True)",
        "test_tokenize.py::test_tokenize_with_",
    ),
    "system_fingerprint is the build of llama.cpp": (
        "test_(chat_)?completion.py::test_(chat_)?completion_with_openai_library",
    ),
    "the first delta holds an empty text, as OpenAI's does; through its client it cannot be adapted": (
        "test_chat_completion.py::test_logprobs_stream",
    ),
    "options of llama.cpp's command line": (
        "test_basic.py::test_(load_split_model|no_ui)",
        "test_chat_completion.py::test_return_progress\\[64-4-False\\]",
        "test_completion.py::test_nocache_long_input_prompt",
        "test_security.py::test_(access_static_assets|cors_o)",
    ),
    "images": (
        "test_compat_anthropic.py::test_anthropic_(vision|tool_result_with_image)",
        "test_security.py::test_local_media_file",
    ),
    "accepted here and refused there, or the other way round": (
        "test_chat_completion.py::test_invalid_chat_completion_req\\[messages7\\]",
        "test_compat_anthropic.py::test_anthropic_empty_messages",
    ),
    "other models, their templates and answers": (
        "test_chat_completion.py::test_chat_completion_cached_tokens",
        "test_compat_anthropic.py::test_anthropic_thinking_(history_in_count_tokens|with_reasoning_model)",
        "test_completion.py::test_completion_stream_with_openai_library_stops",
        "test_tool_call.py::test_(weather|calc_result|thoughts|hello_world|completion_without_tool_call_slow)",
        "test_tool_call.py::test_completion_with_required_tool_real_model\\[(?!.*Qwen2.5-1.5B)",
    ),
    "skipped by llama.cpp": ("test_completion.py::test_cache_vs_nocache_prompt",),
}
NATIVE = {"/completion", "/completions"}
DROPPED = {"cache_prompt", "id_slot", "timings_per_token"}
FORMATTED = "response_format"  # in the names of cases whose pattern is what the format must bring about


class Count(int):
    """Equal to any number that counts something."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    __hash__ = int.__hash__


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    patterns = {pattern: re.compile(pattern) for patterns in LEFT_OUT.values() for pattern in patterns}
    met: set[str] = set()
    kept, dropped = [], []
    for item in items:
        name = f"{item.path.name}::{item.name}"
        found = {pattern for pattern, compiled in patterns.items() if compiled.match(name)}
        met |= found
        (dropped if found or item.path.name not in FILES else kept).append(item)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "n_prompt" in params:
            params["n_prompt"] = Count()
    if len(patterns) > len(met):
        raise pytest.UsageError(f"no case has these names: {sorted(patterns.keys() - met)}")
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def start(server: utils.ServerProcess, timeout_seconds: float = 0) -> None:
    at = urlsplit(os.environ["SALA_KEYED" if server.api_key else "SALA_ADDRESS"])
    server.server_host, server.server_port = at.hostname, at.port


def match_regex(regex: str, text: str) -> bool:
    """Whether it matches where the request prescribes it; otherwise any text will do."""
    return match_literally(regex, text) if FORMATTED in os.environ["PYTEST_CURRENT_TEST"] else bool(text)


def make_request(
    server: utils.ServerProcess, method: str, path: str, data: Any = None, headers: Any = None, timeout: Any = 600
) -> utils.ServerResponse:
    answer = request(server, method, *_asked(server, path, data), headers, timeout)
    if isinstance(answer.body, dict):
        answer.body = _answered(server, answer.body, path)
    return answer


def make_stream_request(
    server: utils.ServerProcess, method: str, path: str, data: Any = None, headers: Any = None
) -> Iterator[Json]:
    for event in stream(server, method, *_asked(server, path, data), headers):
        yield _answered(server, event, path)


def _asked(server: utils.ServerProcess, path: str, data: Any) -> tuple[str, Any]:
    if not isinstance(data, dict):
        return path, data
    data = {name: value for name, value in data.items() if name not in DROPPED}
    if path not in NATIVE:
        return path, data
    length = data.pop("n_predict", server.n_predict)
    given = {"max_tokens": length, "temperature": server.temperature, "seed": server.seed}
    return "/v1/completions", given | data


def _answered(server: utils.ServerProcess, answer: Json, path: str) -> Json:
    if path in NATIVE and answer.get("choices"):
        answer = {**answer, "content": answer["choices"][0]["text"]}
    if answer.get("object", "").startswith("chat.completion"):
        answer["system_fingerprint"] = "b"
    if answer.get("model") == MODEL:
        answer["model"] = server.model_alias
    for card in answer.get("data", ()):
        if card["id"] == MODEL:
            card["id"] = server.model_alias
    for choice in answer.get("choices", ()):
        if choice.get("delta", {}).get("role") and choice["delta"].get("content") == "":
            choice["delta"]["content"] = None
    return answer


match_literally = utils.match_regex
request, stream = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request
utils.match_regex = match_regex
utils.ServerProcess.start = start
utils.ServerProcess.stop = lambda server: None
utils.ServerProcess.make_request = make_request
utils.ServerProcess.make_stream_request = make_stream_request
