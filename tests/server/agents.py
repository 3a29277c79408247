"""Coding agents as they talk to a server: requests in the shape that these programs send, and conversations that grow.

The shapes were taken from Claude Code 2.1, Codex 0.169 and OpenCode 1.18; prompts and tools are our own. Every agent
streams, reads its events as the program does, and sends back what it was given.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.server.agent_prompts import SMALL, Prompt, prose
from tests.server.conftest import Server, join_calls, read_events

# What a chat template for agents does: tools stand in the system message, reasoning is kept since the last question
# only, and results of tools are messages of the user.
TEMPLATE = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<function name="' + call.function.name + '">' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<param name="' + name + '">' + (value if value is string else value | tojson) + '</param>' }}
            {%- endfor %}
            {{- '</function>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def call(name: str, **arguments: str) -> str:
    """Return a call as the model writes it."""
    inside = "".join(f'<param name="{key}">{value}</param>' for key, value in arguments.items())
    return f'<function name="{name}">{inside}</function>'


@dataclass
class Turn:
    """What one request got: tokens of the prompt and of its cached part, text, and calls by id."""

    prompt: int
    cached: int
    text: str
    calls: dict[str, Any]


@dataclass
class Agent:
    """A conversation. `ask` sends a question, `answer_calls` the results of all calls of the last turn."""

    server: Server
    say: Callable[[str], None]
    prompt: Prompt = SMALL
    history: list[Any] = field(default_factory=list)
    num_requests: int = 0
    first_size: int = 0  # characters of the first request

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> list[Any]:
        self.num_requests += 1
        self.first_size = self.first_size or len(json.dumps(body))
        response = self.server.post(path, body, headers=headers or {})
        assert response.status_code == 200, response.text
        blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
        return read_events("\n\n".join(block[block.index("data: ") :] for block in blocks))


@dataclass
class ClaudeCode(Agent):
    """POST /v1/messages?beta=true: blocks that are marked for caching, a line that varies, thinking without limits."""

    reminder = "<system-reminder>\nFiles: calc.py, test_calc.py\n</system-reminder>"

    def ask(self, question: str, answer: str) -> Turn:
        texts = [] if self.history else [{"type": "text", "text": self.reminder}]
        self.history.append({"role": "user", "content": [*texts, {"type": "text", "text": question}]})
        if texts:  # a message in the middle, with what may change while the program runs
            self.history.append({"role": "system", "content": "Agents that can be started: " + prose(400, 1)})
        return self._turn(answer)

    def answer_calls(self, results: Sequence[str], answer: str) -> Turn:
        ids = [block["id"] for block in self.history[-1]["content"] if block["type"] == "tool_use"]
        content: list[Any] = [
            {"tool_use_id": one, "type": "tool_result", "content": text, "is_error": text.startswith("Error")}
            for one, text in zip(ids, results, strict=True)
        ]
        self.history.append({"role": "user", "content": content})
        return self._turn(answer)

    def title(self) -> None:
        """A request of its own between two turns: no tools, no thinking, a format that is enforced."""
        schema = {"type": "object", "properties": {"title": {"enum": ["Fix addition"]}}, "required": ["title"]}
        body = {
            "model": self.server.llm.path.name,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Name this conversation."}]}],
            "system": [{"type": "text", "text": self._billing()}, {"type": "text", "text": "You write titles."}],
            "tools": [],
            "max_tokens": 64,
            "temperature": 1,
            "thinking": {"type": "disabled"},
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
            "stream": True,
        }
        self.say('{"title": "Fix addition"}')
        assert self.post("/v1/messages?beta=true", body)[-1]["type"] == "message_stop"

    def count(self, question: str) -> int:
        """Count the tokens of the next prompt, which asks this."""
        content = [{"type": "text", "text": question}]
        body = {key: self._body()[key] for key in ("model", "system", "tools", "thinking")}
        body["messages"] = [*self.history, {"role": "user", "content": content}]
        response = self.server.post("/v1/messages/count_tokens?beta=true", body)
        assert response.status_code == 200, response.text
        return int(response.json()["input_tokens"])

    def _billing(self) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.197.{self.num_requests:03x}; cc_entrypoint=cli; cch=00;"

    def _body(self) -> dict[str, Any]:
        marked = {"cache_control": {"type": "ephemeral"}}
        messages = json.loads(json.dumps(self.history))
        last = next(one for one in reversed(messages) if one["role"] == "user")
        last["content"][-1] |= marked  # the mark moves on with every turn
        return {
            "model": self.server.llm.path.name,
            "messages": messages,
            "system": [
                {"type": "text", "text": self._billing()},
                {"type": "text", "text": "You are an agent.", **marked},
                {"type": "text", "text": self.prompt.system, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
            "tools": [
                {"name": name, "description": words, "input_schema": schema}
                for name, (words, schema) in self.prompt.functions.items()
            ],
            "metadata": {"user_id": '{"device_id":"0","session_id":"1"}'},
            "max_tokens": 32_000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        }

    def _turn(self, answer: str) -> Turn:
        self.say(answer)
        headers = {
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
            "x-api-key": "none",
        }
        events = self.post("/v1/messages?beta=true", self._body(), headers)
        blocks: list[dict[str, Any]] = []
        raw: dict[int, str] = {}
        usage: dict[str, int] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                if delta["type"] == "input_json_delta":
                    raw[event["index"]] = raw.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            elif event["type"] == "message_delta":
                usage = event["usage"]
        for index, text in raw.items():
            blocks[index]["input"] = json.loads(text)
        assert events[-1]["type"] == "message_stop"
        self.history.append({"role": "assistant", "content": blocks})
        calls = {block["id"]: block["input"] for block in blocks if block["type"] == "tool_use"}
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        cached = usage["cache_read_input_tokens"]
        return Turn(usage["input_tokens"] + cached, cached, text, calls)


def _short(tool: Any) -> Any:
    return {**tool, "description": "Asks another agent."}


@dataclass
class Codex(Agent):
    """POST /v1/responses: items, tools of all types, nothing stored, marks that vary."""

    opening = (
        ("developer", "<permissions instructions>\nEverything is permitted.\n</permissions instructions>"),
        ("user", "<environment_context>\n  <cwd>/src</cwd>\n  <shell>bash</shell>\n</environment_context>"),
    )
    outputs = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}  # noqa: RUF012

    def ask(self, question: str, answer: str) -> Turn:
        opening = () if self.history else (("developer", self.prompt.system), *self.opening)
        messages = [*opening, ("user", question)]
        for role, text in messages:
            content = [{"type": "input_text", "text": text}]
            mark = f"msg_{len(self.history)}"
            self.history.append({"type": "message", "id": mark, "role": role, "content": content})
        return self._turn(answer)

    def answer_calls(self, results: Sequence[str], answer: str) -> Turn:
        calls = [item for item in self.history if item["type"].endswith("_call")][-len(results) :]
        for item, result in zip(calls, results, strict=True):
            if item["type"] == "local_shell_call":
                self.history.append({"type": "local_shell_call_output", "id": item["call_id"], "output": result})
                continue
            output: Any = [{"type": "input_text", "text": result}] if item["type"] == "custom_tool_call" else result
            self.history.append({"type": self.outputs[item["type"]], "call_id": item["call_id"], "output": output})
        return self._turn(answer)

    def _body(self) -> dict[str, Any]:
        functions = [
            {"type": "function", "name": name, "description": words, "strict": False, "parameters": schema}
            for name, (words, schema) in self.prompt.functions.items()
        ]
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /[\\s\\S]+/"}
        return {
            "model": self.server.llm.path.name,
            "stream": True,
            "input": self.history,
            "tools": [
                *functions,
                {
                    "type": "namespace",
                    "name": "agents",
                    "description": "Other agents.",
                    "tools": [*map(_short, functions[:2])],
                },
                {"type": "custom", "name": "apply_patch", "description": prose(300, 2), "format": grammar},
                {"type": "local_shell"},
                {"type": "web_search", "external_web_access": True},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a1f00f",
            "text": {"verbosity": "low"},
            "client_metadata": {"turn_id": str(self.num_requests)},
        }

    def _turn(self, answer: str) -> Turn:
        self.say(answer)
        headers = {"session-id": "01a1f00f", "originator": "codex_exec", "x-codex-window-id": str(self.num_requests)}
        events = self.post("/v1/responses", self._body(), headers)
        response = events[-1]["response"]
        assert response["status"] == "completed"
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert items == response["output"]
        self.history += items
        calls = {item["call_id"]: item for item in items if item["type"].endswith("_call")}
        text = "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
        usage = response["usage"]
        return Turn(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], text, calls)


@dataclass
class ChatAgent(Agent):
    """POST /v1/chat/completions, as agents on the AI SDK send it: reasoning goes back, arguments are written anew."""

    def ask(self, question: str, answer: str) -> Turn:
        self.history += [] if self.history else [{"role": "system", "content": self.prompt.system}]
        self.history.append({"role": "user", "content": question})
        return self._turn(answer)

    def answer_calls(self, results: Sequence[str], answer: str) -> Turn:
        for one, text in zip(self.history[-1]["tool_calls"], results, strict=True):
            self.history.append({"role": "tool", "tool_call_id": one["id"], "content": text})
        return self._turn(answer)

    def _turn(self, answer: str) -> Turn:
        self.say(answer)
        body = {
            "model": self.server.llm.path.name,
            "max_tokens": 8192,
            "messages": self.history,
            "tools": [
                {"type": "function", "function": {"name": name, "description": words, "parameters": schema}}
                for name, (words, schema) in self.prompt.functions.items()
            ],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events = self.post("/v1/chat/completions", body)
        assert events[-1] == "[DONE]"
        calls = join_calls(events)
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": calls}
        for event in events[:-1]:
            for choice in event["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                message["reasoning_content"] += delta.get("reasoning_content") or ""
        for one in calls:
            del one["index"]
            arguments = json.loads(one["function"]["arguments"])
            one["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        self.history.append({key: value for key, value in message.items() if value or key == "content"})
        usage = next(event["usage"] for event in reversed(events[:-1]) if event.get("usage"))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        by_id = {one["id"]: one["function"] for one in calls}
        return Turn(usage["prompt_tokens"], cached, message["content"], by_id)
