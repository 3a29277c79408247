"""The openai package on /v1/responses. Arguments: the server's address, a model."""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel, Field

FRANCE = "What is the capital of France?"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(BaseModel):
    name: str = Field(max_length=20)


def main() -> None:
    client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    options = {"model": sys.argv[2], "temperature": 0, "max_output_tokens": 96}
    whole = client.responses.create(input=FRANCE, instructions="Be brief.", **options)
    assert whole.output_text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(input=FRANCE, instructions="Be brief.", **options) as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == whole.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    asked = client.responses.create(
        input="How is the weather in Paris?", tools=[WEATHER], tool_choice="required", **options
    )
    call = next(item for item in asked.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [{"role": "user", "content": FRANCE}, *asked.output, result]
    assert client.responses.create(input=history, tools=[WEATHER], **options).status in ("completed", "incomplete")
    check_turns(client, options)
    parsed = client.responses.parse(input=FRANCE, text_format=City, **options)
    assert isinstance(parsed.output_parsed, City)


def check_turns(client: OpenAI, options: dict[str, object]) -> None:
    """Three turns, of which only what is new is sent: the server has the rest."""
    first = client.responses.create(input=FRANCE, **options)
    more = {"tools": [WEATHER], **options}
    called = client.responses.create(
        input="How is the weather there?", previous_response_id=first.id, tool_choice="required", **more
    )
    calls = [item for item in called.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    with client.responses.stream(input=results, previous_response_id=called.id, **more) as events:
        events.until_done()
        last = events.get_final_response()
    assert first.usage.input_tokens < called.usage.input_tokens < last.usage.input_tokens
    client.responses.delete(called.id)
    assert client.responses.retrieve(last.id).previous_response_id == called.id


if __name__ == "__main__":
    main()
