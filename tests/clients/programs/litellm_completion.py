"""litellm with the prefix openai/: turns, streams, tools, text. Arguments: the server's address, a model."""

import json
import sys
from typing import Any

import litellm

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = {"type": "text", "text": "And of Italy?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}


def main() -> None:
    address = {"model": f"openai/{sys.argv[2]}", "base_url": sys.argv[1] + "/v1", "api_key": "none"}
    options = {**address, "temperature": 0, "max_tokens": 32}
    whole = litellm.completion(messages=FRANCE, **options)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=FRANCE, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    called = litellm.completion(
        messages=FRANCE, tools=[WEATHER], tool_choice="required", **{**options, "max_tokens": 96}
    )
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
    check_turns(options)
    check_overflow(options)
    text = {**address, "model": f"text-completion-openai/{sys.argv[2]}"}
    assert litellm.text_completion(prompt="Once upon", max_tokens=4, **text).choices[0].text
    try:
        litellm.completion(messages=FRANCE, **{**options, "model": "openai/no-such-model"})
        raise SystemExit("a model that is not there has answered")
    except litellm.NotFoundError:
        pass


def check_turns(options: dict[str, Any]) -> None:
    """Append answers to the conversation as they are, as every tutorial does: text, a call with its result, a cut."""
    messages: list[Any] = [*FRANCE]
    messages.append(litellm.completion(messages=messages, **options).choices[0].message)
    messages.append({"role": "user", "content": [{**TEXT, "cache_control": {"type": "ephemeral"}}]})
    message = litellm.completion(messages=messages, **options).choices[0].message
    messages += [message.model_dump(), {"role": "user", "content": "And now?"}]
    tools = {"tools": [WEATHER], "tool_choice": "required", **options, "max_tokens": 96}
    answer = litellm.completion(messages=messages, **tools).choices[0]
    assert answer.finish_reason == "tool_calls", answer
    for call in answer.message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in answer.message.tool_calls]
    messages += [answer.message, *results]
    assert litellm.completion(messages=messages, tools=[WEATHER], **options).choices[0].finish_reason
    cut = litellm.completion(messages=FRANCE, **{**tools, "max_tokens": 9}).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", None), cut
    chunks = litellm.completion(messages=FRANCE, **{**tools, "max_tokens": 9}, stream=True)
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    if cut.message.tool_calls:
        result = {"role": "tool", "tool_call_id": cut.message.tool_calls[0].id, "content": "cut"}
        assert litellm.completion(messages=[*FRANCE, cut.message, result], **options).choices[0].finish_reason


def check_overflow(options: dict[str, Any]) -> None:
    """Routers of litellm fall back to a longer context by this exception alone."""
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 20_000}], **options)
        raise SystemExit("a prompt that is too long was answered")
    except litellm.ContextWindowExceededError:
        pass


if __name__ == "__main__":
    main()
