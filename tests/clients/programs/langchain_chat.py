"""langchain-openai: invoke, stream, tools, structured output. Arguments: the server's address, a model."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

FRANCE = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


def main() -> None:
    address = {"base_url": sys.argv[1] + "/v1", "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(model=sys.argv[2], temperature=0, max_tokens=64, **address)
    whole = chat.invoke(FRANCE)
    assert whole.content
    assert whole.usage_metadata["total_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(FRANCE)) == whole.content
    assert [answer.content for answer in chat.batch([FRANCE, FRANCE])] == [whole.content] * 2
    asked = HumanMessage("How is the weather in Paris?")
    called = chat.bind_tools([get_weather], tool_choice="required").invoke([asked])
    assert called.tool_calls[0]["name"] == "get_weather"
    result = ToolMessage(get_weather.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"])
    assert chat.bind_tools([get_weather]).invoke([asked, called, result]).response_metadata["finish_reason"]
    assert isinstance(chat.with_structured_output(City).invoke(FRANCE), City)
    assert OpenAI(model=chat.model_name, temperature=0, max_tokens=4, **address).invoke("Once upon")


if __name__ == "__main__":
    main()
