"""Reasoning and tool calls in vLLM's answers, by the rules of our own server.

Only an answer that begins with the opening tag reasons: vLLM's parsers take everything up to a closing tag for
reasoning, so that a model that never reasons would have no answer, and need the tags as tokens, which not every
tokenizer has. Calls have the form of the released model: vLLM's parser for it (`minicpm5`) drops the text before a
call, and in a stream shows a call as text too.
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return"

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.reasoning import ReasoningParser
from vllm.tool_parsers import ToolParser

from sala.plugins.vllm.releases import answer_types
from sala.text.answer import Delta, ReasoningSplitter
from sala.text.tools import ToolCall, ToolSplitter


class SalaReasoningParser(ReasoningParser):
    """vLLM makes one per request. Schemas need `enable_in_reasoning`: its engine does not see when reasoning ends."""

    def __init__(self, tokenizer: Any, *args: Any, **options: Any) -> None:
        super().__init__(tokenizer, *args, **options)
        self._splitter = ReasoningSplitter()

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        splitter = ReasoningSplitter()
        deltas = [*splitter.push(model_output), *splitter.flush()]
        return _join(deltas)

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> Any:
        reasoning, text = _join(list(self._splitter.push(delta_text)))
        return answer_types().DeltaMessage(reasoning=reasoning, content=text) if reasoning or text else None

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the prompt ends the reasoning: it never does, the answer decides."""
        return False

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        return self._splitter.has_text

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Return the tokens of the answer's text; the tags need not be tokens, so all of them."""
        return input_ids


def _join(deltas: Sequence[Delta]) -> tuple[str | None, str | None]:
    """Return reasoning and text; None for what there is none of."""
    return "".join(delta.reasoning for delta in deltas) or None, "".join(delta.text for delta in deltas) or None


class SalaToolParser(ToolParser):
    """vLLM makes one per request. A call is passed on when it is complete."""

    def __init__(self, tokenizer: Any, tools: Any = None, *args: Any, **options: Any) -> None:
        super().__init__(tokenizer, tools, *args, **options)
        self._schemas = [tool.model_dump() for tool in tools or ()]
        self._splitter = ToolSplitter(self._schemas)
        self._count = 0

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        types, splitter = answer_types(), ToolSplitter(self._schemas)
        parts = [*splitter.push(model_output), *splitter.flush()]
        text = "".join(part for part in parts if isinstance(part, str)).strip()
        calls = [part for part in parts if isinstance(part, ToolCall)]
        named = [
            types.ToolCall(id=call.id, function=types.FunctionCall(name=call.name, arguments=call.json))
            for call in calls
        ]
        return types.ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=named, content=text or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        parts = list(self._splitter.push(delta_text))
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [self._pass_on(part) for part in parts if isinstance(part, ToolCall)]
        return answer_types().DeltaMessage(content=text or None, tool_calls=calls) if text or calls else None

    def _pass_on(self, call: ToolCall) -> Any:
        """Return a piece with a whole call, and note it where vLLM looks for calls at the end."""
        types = answer_types()
        function = types.DeltaFunctionCall(name=call.name, arguments=call.json)
        self.prev_tool_call_arr.append({"name": call.name, "arguments": call.json})
        self.streamed_args_for_tool.append(call.json)
        self._count += 1
        return types.DeltaToolCall(index=self._count - 1, id=call.id, type="function", function=function)
