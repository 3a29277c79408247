"""The anthropic package on /v1/messages. Arguments: the server's address, a model."""

import sys

import anthropic
from anthropic import Anthropic

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def main() -> None:
    client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
    model = sys.argv[2]
    options = {"model": model, "max_tokens": 32, "extra_body": {"temperature": 0}}
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
    assert set(call.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [*asked, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=history, tools=[WEATHER], **options).content is not None
    assert refusal(client, model).body["type"] == "error"


def refusal(client: Anthropic, model: str) -> anthropic.BadRequestError:
    try:
        client.messages.create(model=model, messages=FRANCE, max_tokens=-1)
    except anthropic.BadRequestError as error:
        return error
    raise SystemExit("a negative length was taken")


if __name__ == "__main__":
    main()
