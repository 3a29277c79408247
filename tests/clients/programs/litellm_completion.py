"""litellm with the prefix openai/: whole, streamed, tools, text. Arguments: the server's address, a model."""

import json
import sys

import litellm

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
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
    called = litellm.completion(messages=FRANCE, tools=[WEATHER], tool_choice="required", **options)
    assert set(json.loads(called.choices[0].message.tool_calls[0].function.arguments)) == {"city"}
    text = {**address, "model": f"text-completion-openai/{sys.argv[2]}"}
    assert litellm.text_completion(prompt="Once upon", max_tokens=4, **text).choices[0].text
    try:
        litellm.completion(messages=FRANCE, **{**options, "model": "openai/no-such-model"})
        raise SystemExit("a model that is not there has answered")
    except litellm.NotFoundError:
        pass


if __name__ == "__main__":
    main()
