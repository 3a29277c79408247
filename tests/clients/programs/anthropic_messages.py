"""The anthropic package on /v1/messages. Arguments: the server's address, a model."""

import sys
from typing import Literal

import anthropic
from anthropic import Anthropic, beta_tool

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}

CALL = {"type": "tool", "name": "get_weather"}


def main() -> None:
    client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
    model = sys.argv[2]
    options = {"model": model, "max_tokens": 96, "extra_body": {"temperature": 0}}
    whole = client.messages.create(messages=FRANCE, system="Be brief.", **options)
    assert whole.content[0].text
    assert whole.usage.output_tokens > 0
    with client.messages.stream(messages=FRANCE, system="Be brief.", **options) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().stop_reason == whole.stop_reason
    count = client.messages.count_tokens(model=model, messages=FRANCE, system="Be brief.")
    assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    asked = [{"role": "user", "content": "How is the weather in Paris?"}]
    message = client.messages.create(messages=asked, tools=[WEATHER], tool_choice={"type": "any"}, **options)
    call = next(block for block in message.content if block.type == "tool_use")
    assert call.input in ({"city": "Paris"}, {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [*asked, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=history, tools=[WEATHER], **options).content is not None
    check_turns(client, options)
    assert refusal(client, model).body["type"] == "error"


def check_turns(client: Anthropic, options: dict[str, object]) -> None:
    """Append answers to the conversation as they are: text, then a call with its result; and let a helper do so."""
    messages = [*FRANCE]
    first = client.messages.create(messages=messages, **options)
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "How is the weather?"}]
    with client.messages.stream(messages=messages, tools=[WEATHER], tool_choice=CALL, **options) as stream:
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        for block in called.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    assert client.messages.create(messages=messages, tools=[WEATHER], **options).stop_reason
    cities: list[str] = []

    @beta_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(
        messages=FRANCE, tools=[get_weather], tool_choice=CALL, max_iterations=2, **options
    )
    assert [message.role for message in runner] == ["assistant", "assistant"]
    assert cities


def refusal(client: Anthropic, model: str) -> anthropic.BadRequestError:
    try:
        client.messages.create(model=model, messages=FRANCE, max_tokens=-1)
    except anthropic.BadRequestError as error:
        return error
    raise SystemExit("a negative length was taken")


if __name__ == "__main__":
    main()
