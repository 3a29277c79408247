"""langchain-openai: invoke, stream, tools, structured output. Arguments: the server's address, a model."""

import sys
from typing import Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

FRANCE = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sunny"


def main() -> None:
    address = {"base_url": sys.argv[1] + "/v1", "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(model=sys.argv[2], temperature=0, max_tokens=96, **address)
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
    check_turns(chat)
    assert OpenAI(model=chat.model_name, temperature=0, max_tokens=4, **address).invoke("Once upon")


def check_turns(chat: ChatOpenAI) -> None:
    """Append answers to the conversation as they are: text, calls with results, and a call that is cut."""
    history: list[BaseMessage] = [HumanMessage(FRANCE)]
    history += [chat.invoke(history), HumanMessage("And of Italy?")]
    history += [chat.invoke(history), HumanMessage("How is the weather there?")]
    called = chat.bind_tools([get_weather], tool_choice="any").invoke(history)
    assert called.response_metadata["finish_reason"] == "tool_calls", called
    history += [called, *(ToolMessage("sunny", tool_call_id=call["id"]) for call in called.tool_calls)]
    assert chat.bind_tools([get_weather]).invoke(history).response_metadata["finish_reason"]
    cut = chat.bind_tools([get_weather], tool_choice="any").invoke(FRANCE, max_tokens=9)
    assert (cut.content, cut.tool_calls) == ("", []), cut
    forced = chat.with_structured_output(City, method="function_calling").invoke(FRANCE)
    assert isinstance(forced, City)
    try:
        chat.invoke("word " * 20_000)
        raise SystemExit("a prompt that is too long was answered")
    except ContextOverflowError:
        pass


if __name__ == "__main__":
    main()
