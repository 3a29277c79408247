"""The package instructor: two turns with a tool each, streamed parts too. Arguments: the server's address, a model."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

FRANCE = {"role": "user", "content": "What is the capital of France?"}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


class Weather(BaseModel):
    """The weather of a city."""

    degrees: int = Field(ge=-90, le=60)


def main() -> None:
    raw = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    options = {"model": sys.argv[2], "temperature": 0, "max_tokens": 128, "max_retries": 1}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(raw, mode=mode)
        messages = [FRANCE]
        city, answer = client.chat.completions.create_with_completion(messages=messages, response_model=City, **options)
        assert isinstance(city, City)
        message = answer.choices[0].message
        calls = message.tool_calls or []
        assert len(calls) == (mode == instructor.Mode.TOOLS)
        messages = [FRANCE, message.model_dump()]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "right"} for call in calls]
        messages.append({"role": "user", "content": "How warm is it there?"})
        weather = client.chat.completions.create(messages=messages, response_model=Weather, **options)
        assert -90 <= weather.degrees <= 60
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(messages=[FRANCE], response_model=City, **options))
    assert parts[-1].name is not None


if __name__ == "__main__":
    main()
