"""The package pydantic-ai: an agent with a tool, in two turns. Arguments: the server's address, a model."""

import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunContext, ToolDefinition, UsageLimits
from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0, "max_tokens": 128}


class City(BaseModel):
    """The answer."""

    name: str = Field(max_length=20)


async def choose(context: RunContext[None], tools: list[ToolDefinition]) -> list[ToolDefinition]:
    """Offer functions in the first step of a run and the answer in the others: a small model would not choose well."""
    is_first = context.run_step == 1
    return [tool for tool in tools if (tool.kind == "function") == is_first]


def check(model: Model) -> None:
    plain = Agent(model, model_settings=SETTINGS, instructions="Be brief.")
    first = plain.run_sync("What is the capital of France?")
    assert first.output
    chosen = [PrepareTools(choose), PrepareOutputTools(choose)]
    agent = Agent(model, model_settings=SETTINGS, output_type=City, capabilities=chosen, retries=2)
    cities: list[str] = []

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    limits = UsageLimits(request_limit=6)
    second = agent.run_sync("How is the weather there?", message_history=first.all_messages(), usage_limits=limits)
    assert isinstance(second.output, City)
    parts = [part for message in second.new_messages() for part in message.parts]
    called = [part.tool_name for part in parts if isinstance(part, ToolCallPart)]
    assert (called[0], called[-1]) == ("get_weather", "final_result")
    assert len(cities) == called.count("get_weather")
    third = plain.run_stream_sync("And of Italy?", message_history=second.all_messages())
    assert "".join(third.stream_text(delta=True))


def main() -> None:
    provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        check(kind(sys.argv[2], provider=provider))


if __name__ == "__main__":
    main()
