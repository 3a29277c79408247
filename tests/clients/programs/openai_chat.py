"""The openai package: chats, completions, models. Arguments: the server's address, a model, `vllm` if that is it."""

import asyncio
import json
import sys

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

URL = sys.argv[1] + "/v1"
IS_VLLM = sys.argv[3:] == ["vllm"]  # which streams the arguments of a call without spaces
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


def main() -> None:
    client = OpenAI(base_url=URL, api_key="none", max_retries=0)
    model = sys.argv[2]
    assert model in [one.id for one in client.models.list()]
    assert client.models.retrieve(model).id == model
    for check in (check_chat, check_stream, check_tools, check_turns, check_schema, check_completions, check_errors):
        check(client, model)
        print(check.__name__)
    asyncio.run(check_async(model))
    print("check_async")


def check_chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=FRANCE, temperature=0, max_completion_tokens=16, n=2, logprobs=True, top_logprobs=3
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_stream(client: OpenAI, model: str) -> None:
    options = {"model": model, "messages": FRANCE, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**options).choices[0].message.content
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(**options) as events:
        assert events.get_final_completion().choices[0].message.content == whole


def check_tools(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    options = {"model": model, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 96, "temperature": 0}
    options["parallel_tool_calls"] = False
    message = client.chat.completions.create(messages=messages, **options).choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    with client.chat.completions.stream(messages=messages, **options) as events:
        again = events.get_final_completion().choices[0].message.tool_calls[0]
    same = json.loads if IS_VLLM else str
    assert same(again.function.arguments) == same(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    conversation = [*messages, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model=model, messages=conversation, tools=[WEATHER], max_tokens=16)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def check_turns(client: OpenAI, model: str) -> None:
    """Append answers to the conversation as the package returns them: parsed, plain, calls with their results."""
    options = {"model": model, "max_tokens": 96, "temperature": 0}
    messages: list[object] = [*FRANCE]
    parsed = client.chat.completions.parse(messages=messages, response_format=City, **options)
    messages.append(parsed.choices[0].message)
    messages.append({"role": "user", "content": "And of Italy?"})
    messages.append(client.chat.completions.create(messages=messages, **options).choices[0].message)
    messages.append({"role": "user", "content": "How is the weather there?"})
    tools = {"tools": [WEATHER], "tool_choice": "required", **options}
    called = client.chat.completions.create(messages=messages, **tools).choices[0]
    assert called.finish_reason == "tool_calls"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in called.message.tool_calls]
    messages += [called.message, *results]
    answer = client.chat.completions.create(messages=messages, tools=[WEATHER], **options).choices[0]
    assert answer.message.content or answer.message.tool_calls


def check_schema(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=FRANCE, response_format=City, max_tokens=64, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def check_completions(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="Once upon", max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "Once upon"
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    answer = client.completions.create(model=model, prompt=["Once upon", "The end"], max_tokens=4, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    pieces = client.completions.create(model=model, prompt="Once upon", max_tokens=4, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces)


def check_errors(client: OpenAI, model: str) -> None:
    assert refusal(openai.NotFoundError, client, model="no-such-model").code == "model_not_found"
    assert refusal(openai.BadRequestError, client, model=model, temperature=-1).param == "temperature"


def refusal(kind: type[openai.APIStatusError], client: OpenAI, **options: object) -> openai.APIStatusError:
    try:
        client.chat.completions.create(messages=FRANCE, **options)
    except kind as error:
        return error
    raise SystemExit(f"{options} was taken")


async def check_async(model: str) -> None:
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        tasks = [client.chat.completions.create(model=model, messages=FRANCE, max_tokens=8) for _ in range(3)]
        assert all(answer.usage.completion_tokens > 0 for answer in await asyncio.gather(*tasks))
        stream = await client.chat.completions.create(model=model, messages=FRANCE, max_tokens=8, stream=True)
        async for _ in stream:
            break  # leaving a stream is nothing special
        await stream.close()


if __name__ == "__main__":
    main()
