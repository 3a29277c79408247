"""The package openai-agents: an agent with a tool, two turns, both APIs. Arguments: the server's address, a model."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

cities: list[str] = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    cities.append(city)
    return "sunny"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(sys.argv[2], client)
        settings = ModelSettings(temperature=0, max_tokens=96)
        plain = Agent("plain", instructions="Be brief.", model=model, model_settings=settings)
        # After the first call the tool choice becomes auto again.
        forced = settings.resolve(ModelSettings(tool_choice="required"))
        calling = Agent("calling", model=model, model_settings=forced, tools=[get_weather])
        session = SQLiteSession(kind.__name__)
        assert (await Runner.run(plain, "What is the capital of France?", session=session)).final_output
        cities.clear()
        answer = await Runner.run(calling, "How is the weather there?", session=session)
        assert answer.final_output
        assert cities
        streamed = Runner.run_streamed(calling, "And in Rome?", session=session)
        kinds = {event.type async for event in streamed.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds
        assert len(cities) > 1
        assert streamed.final_output
        items = await session.get_items()
        assert {"function_call", "function_call_output"} <= {item.get("type") for item in items}


if __name__ == "__main__":
    asyncio.run(main())
