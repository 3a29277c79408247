"""The openai package on /v1/responses. Arguments: the server's address, a model."""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel

FRANCE = "What is the capital of France?"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(BaseModel):
    name: str


def main() -> None:
    client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    options = {"model": sys.argv[2], "temperature": 0, "max_output_tokens": 64}
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
    assert set(json.loads(call.arguments)) == {"city"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [{"role": "user", "content": FRANCE}, *asked.output, result]
    assert client.responses.create(input=history, tools=[WEATHER], **options).status in ("completed", "incomplete")
    parsed = client.responses.parse(input=FRANCE, text_format=City, **options)
    assert isinstance(parsed.output_parsed, City)


if __name__ == "__main__":
    main()
