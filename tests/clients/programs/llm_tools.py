"""The package llm: a conversation of two turns, the second with a tool. Arguments: the server's address, a model.

Its models are described in the directory LLM_USER_PATH.
"""

import json
import os
import sys
from pathlib import Path
from typing import Literal

cities: list[str] = []


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    cities.append(city)
    return "sunny"


def main() -> None:
    entry = {"model_id": "sala", "model_name": sys.argv[2], "api_base": f"{sys.argv[1]}/v1", "supports_tools": True}
    Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(json.dumps([entry]))
    import llm

    model = llm.get_model("sala")
    build = model.build_kwargs

    def demand_call(prompt: llm.Prompt, stream: bool) -> dict[str, object]:
        """Add what llm has no option for: a small model would not call a tool by itself."""
        return build(prompt, stream) | ({"tool_choice": "required"} if prompt.tools and not prompt.tool_results else {})

    model.build_kwargs = demand_call
    for stream in (True, False):
        conversation = model.conversation()
        options = {"temperature": 0, "max_tokens": 96}
        assert conversation.prompt("What is the capital of France?", stream=stream, **options).text().strip()
        chain = conversation.chain("How is the weather there?", tools=[get_weather], stream=stream, options=options)
        answers = list(chain.responses())
        assert [call.name for call in answers[0].tool_calls()] == ["get_weather"] * len(cities) != []
        assert answers[-1].text().strip()
        assert not answers[-1].tool_calls()
        cities.clear()


if __name__ == "__main__":
    main()
