"""Plugin of pytest that points llama.cpp's server tests at a running `sala serve`.

It runs in the environment of those tests, so it imports nothing of this repository. What it adapts:

- the address, the model's name, and the numbers and words that only the model of those tests can give
- `/completion`, which is asked as `/v1/completions`; what only llama.cpp says there is filled in
- `__verbose`: the prompt is what `/tokenize` gives, if it has as many tokens as the request had; the marks between
  messages are written as that template writes them
- `/slots`, which `/metrics` answers
- schemas that stand elsewhere in a request, biases as a list, wording and types of errors, and hints
- the null in a first delta, and the name of the build

Cases that cannot be carried over are left out in `LEFT_OUT`, each for a reason; all others must pass.
"""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import utils  # of llama.cpp's tests
from left_out import sort_out

Json = dict[str, Any]
MODEL = os.environ["SALA_MODEL"]
CONTEXT = int(os.environ["SALA_CONTEXT"])
FILES = {
    "test_basic.py", "test_chat_completion.py", "test_compat_anthropic.py", "test_compat_oai_responses.py",
    "test_completion.py", "test_security.py", "test_tokenize.py", "test_tool_call.py",
}  # fmt: skip
LEFT_OUT = {
    "files about endpoints and options of llama.cpp, other models, images and embeddings": (
        f"(?!{'|'.join(map(re.escape, sorted(FILES)))})",
    ),
    "endpoints that only llama.cpp has": (
        "test_basic.py::test_server_(props|slots)",
        "test_chat_completion.py::test_apply_chat_template",
        "test_compat_anthropic.py::test_anthropic_thinking_history_in_template",
        "test_security.py::test_cors_proxy",
    ),
    "tags of models": ("test_basic.py::test_server_model_aliases_and_tags",),
    "grammars in GBNF": ("test_chat_completion.py::test_completion_with_(grammar|invalid_grammar)",),
    "the field verbose, and what it returns": ("test_chat_completion.py::test_verbose_debug",),
    "timings with every delta": ("test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry",),
    "response_fields and generation_settings choose and describe": (
        "test_completion.py::test_completion_response_fields",
    ),
    "prompts as objects, and of tokens and texts together": (
        "test_completion.py::test_completion_with_tokens_input",
        "test_completion.py::test_json_prompt",
    ),
    "n_probs: log-probabilities with the ids of tokens, before or after sampling": (
        "test_completion.py::test_n_probs",
    ),
    "biases of texts instead of tokens": ("test_completion.py::test_logit_bias\\[False",),
    "tokens with their pieces, and the BOS of another tokenizer": ("test_tokenize.py::test_tokenize_with_",),
    "options of the command line: split files, no web page, length of a step, a tiny context": (
        "test_basic.py::test_(load_split_model|no_ui)",
        "test_chat_completion.py::test_return_progress\\[64-4-False\\]",
        "test_completion.py::test_nocache_long_input_prompt",
    ),
    "origins are permitted by another option, and the web page has other files": (
        "test_security.py::test_(access_static_assets|cors_o)",
    ),
    "images": (
        "test_compat_anthropic.py::test_anthropic_(vision|tool_result_with_image)",
        "test_security.py::test_local_media_file",
    ),
    "accepted here: two answers in a row, no messages at all": (
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
DROPPED = {"cache_prompt", "id_slot", "timings_per_token", "return_tokens"}
FORMATTED = ("response_format", "json_schema")  # in names of cases whose pattern is what the format must bring about
STOPPED = {"length": "limit", "stop": "eos"}
TOO_LONG = re.compile(r"maximum context length is ([\d,]+) tokens\D+([\d,]+)")


class Count(int):
    """Equal to any number that counts something, also after another was added."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    def __add__(self, other: int) -> "Count":
        return self

    __hash__ = int.__hash__


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sort_out(config, items, LEFT_OUT)
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "n_prompt" in params:
            params["n_prompt"] = Count(1)
        if "re_prefill" in params:  # parts are joined by one newline
            params["re_prefill"] = params["re_prefill"].replace("\n\n", "\n")


def start(server: utils.ServerProcess, timeout_seconds: float = 0) -> None:
    at = urlsplit(os.environ["SALA_KEYED" if server.api_key else "SALA_ADDRESS"])
    server.server_host, server.server_port = at.hostname, at.port


def match_regex(regex: str, text: str) -> bool:
    """Whether it matches where the request prescribes it; otherwise any text will do."""
    is_formatted = any(name in os.environ["PYTEST_CURRENT_TEST"] for name in FORMATTED)
    return match_literally(regex, text) if is_formatted else bool(text)


def make_request(
    server: utils.ServerProcess, method: str, path: str, data: Any = None, headers: Any = None, timeout: Any = 600
) -> utils.ServerResponse:
    asked = ("/metrics", data) if path == "/slots" else _asked(server, path, data)
    answer = request(server, method, *asked, headers, timeout)
    if path == "/slots":
        running = re.findall(r"^sala_requests_running\S* (\S+)", answer.body, re.MULTILINE)
        answer.body = [{"is_processing": float(number) > 0} for number in running]
    if isinstance(answer.body, dict):
        answer.body = _answered(server, answer.body, path)
    if path in NATIVE and answer.status_code == 200:
        with_tokens = data.get("return_tokens")
        answer.body |= _filled(server, answer.body, headers) | ({} if with_tokens else {"tokens": []})
    if server.debug and answer.status_code == 200:
        answer.body["__verbose"] = {"prompt": _prompt(server, data["messages"], answer.body)}
    return answer


def make_stream_request(
    server: utils.ServerProcess, method: str, path: str, data: Any = None, headers: Any = None
) -> Iterator[Json]:
    try:
        sent = stream(server, method, *_asked(server, path, data), headers)
        events = (_answered(server, event, path) for event in sent)
        yield from _native(server, data, events, headers) if path in NATIVE else events
    except utils.ServerError as error:
        raise utils.ServerError(error.code, _answered(server, error.body, path)) from None


def _asked(server: utils.ServerProcess, path: str, data: Any) -> tuple[str, Any]:
    if not isinstance(data, dict):
        return path, data
    data = {name: value for name, value in data.items() if name not in DROPPED}
    if (form := data.get("response_format", {})).get("type") == "json_object" and "schema" in form:
        data["response_format"] = _schema(form["schema"])
    if "json_schema" in data:
        data["response_format"] = _schema(data.pop("json_schema"))
    if isinstance(data.get("logit_bias"), list):
        data["logit_bias"] = dict(data["logit_bias"])
    if path not in NATIVE:
        return path, data
    length = data.pop("n_predict", server.n_predict)
    length = CONTEXT // 2 if length == -1 else length
    given = {"max_tokens": length, "temperature": server.temperature, "seed": server.seed}
    given["ignore_eos"] = True  # nor does the model of those tests end by itself
    if data.get("stream"):
        given["stream_options"] = {"include_usage": True}
    return "/v1/completions", given | data


def _schema(schema: Any) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "schema", "schema": schema}}


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
    if isinstance(error := answer.get("error"), dict) and error.get("code") == "context_length_exceeded":
        context, length = (int(number.replace(",", "")) for number in TOO_LONG.search(error["message"]).groups())
        error |= {"type": "exceed_context_size_error", "n_prompt_tokens": length}
        error["n_ctx"] = server.n_ctx // server.n_slots if context == CONTEXT else context
    return answer


def _filled(server: utils.ServerProcess, answer: Json, headers: Any) -> Json:
    """What only llama.cpp says with a completion; the tokens are those of the text."""
    text = answer["content"]
    tokens = request(server, "POST", "/tokenize", {"content": text}, headers).body["tokens"]
    timings = answer.get("timings", {})
    if "prompt_n" in timings:
        timings["prompt_n"] = Count(timings["prompt_n"])
    return {"tokens": tokens, "truncated": False, "has_new_line": "\n" in text, "timings": timings}


def _native(server: utils.ServerProcess, data: Json, events: Iterator[Json], headers: Any) -> Iterator[Json]:
    """The events of a completion as llama.cpp sends them: the last one holds the timings."""
    ended: Json = {}
    reason = None
    for event in events:
        reason = event["choices"][0]["finish_reason"] if event["choices"] else reason
        if reason is None:
            yield {**event, **_filled(server, event, headers), "stop": False}
        else:
            ended = {**ended, **event}
    settings = {"n_predict": min(data["n_predict"], server.n_predict), "seed": server.seed}
    settings |= dict.fromkeys(("adaptive_target", "adaptive_decay"))
    yield {
        **ended,
        **_filled(server, ended, headers),
        "stop": True,
        "stop_type": STOPPED.get(reason),
        "generation_settings": settings,
    }


def _prompt(server: utils.ServerProcess, messages: list[Json], answer: Json) -> str | None:
    """The prompt that was answered, as the templates of llama 3 mark it."""
    for is_continued in (True, False):
        body = {"messages": messages, "continue_final_message": is_continued}
        given = request(server, "POST", "/tokenize", body)
        if given.status_code == 200 and given.body["count"] == answer["usage"]["prompt_tokens"]:
            text = request(server, "POST", "/detokenize", {"tokens": given.body["tokens"]}).body["content"]
            text = re.sub(r"<\|im_start\|>(\w+)\n", r"<|start_header_id|>\1<|end_header_id|>\n\n", text)
            return "<s> " + text.replace("<|im_end|>\n", "<|eot_id|>")
    return None


def through_library(create: Callable[..., Any]) -> Callable[..., Any]:
    """`create` of OpenAI's client, whose answers name a build; the first delta holds a null."""

    def events(answer: Iterator[Any]) -> Iterator[Any]:
        for number, event in enumerate(answer):
            if number == 0 and hasattr(event.choices[0], "delta"):
                event.choices[0].delta.content = event.choices[0].delta.content or None
            yield event

    def ask(*given: Any, **named: Any) -> Any:
        answer = create(*given, **named)
        if named.get("stream"):
            return events(answer)
        answer.system_fingerprint = "b"
        return answer

    return ask


match_literally = utils.match_regex
request, stream = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request
utils.match_regex = match_regex
utils.ServerProcess.start = start
utils.ServerProcess.stop = lambda server: None
utils.ServerProcess.make_request = make_request
utils.ServerProcess.make_stream_request = make_stream_request
for api in (openai.resources.completions.Completions, openai.resources.chat.completions.Completions):
    api.create = through_library(api.create)
