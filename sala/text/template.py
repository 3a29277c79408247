"""Chat templates, rendered in a sandbox.

A template is a program from an untrusted source. It runs in Jinja's immutable sandbox, which stops it from reaching
Python, and in a separate process, which can be killed: the sandbox bounds neither time nor memory, and a thread cannot
be stopped.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sala.errors import InputError, TemplateError

Message = Mapping[str, Any]


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InputError for a conversation that is not a list of messages with roles and text."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        remedy = 'e.g. [{"role": "user", "content": "Hello"}]'
        raise InputError("messages", "must be a list with at least one message", remedy)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{index}]", "has no role", 'use {"role": "user", "content": "..."}')
        tokens = message.get("token_ids")
        if tokens is not None and not (isinstance(tokens, list) and all(isinstance(item, int) for item in tokens)):
            raise InputError(f"messages[{index}].token_ids", "is not a list of token ids", "leave it out")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise InputError(f"messages[{index}].content", f"is of type {type(content).__name__}", "give text")


def check_tools(tools: object) -> None:
    """Raise InputError for tools that are not a list of objects."""
    if tools is None:
        return
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError("tools", "must be a list of objects", 'e.g. [{"type": "function", "function": {…}}]')


SECONDS = 2.0
SECONDS_PER_MIB = 0.1  # more time for long documents
MAX_OUTPUT_BYTES = 128 << 20


class ChatTemplate:
    """A chat template; `marks` maps special tokens in its source to secret spellings (see tokenizer).

    Its worker process is started when first needed, and again after it had to be killed.
    """

    def __init__(self, source: str, names: Mapping[str, str | None], marks: Mapping[str, str]) -> None:
        self._marks = marks
        for plain, secret in sorted(marks.items(), key=lambda item: -len(item[0])):
            source = source.replace(plain, secret)
        self._source = source
        self._names = {key: marks.get(name, name) for key, name in names.items() if name is not None}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Render a conversation. `extra` reaches the template as variables; it cannot override the other arguments."""
        variables = {
            **extra,
            **self._names,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            seconds = SECONDS + SECONDS_PER_MIB * len(json.dumps(variables)) / (1 << 20)
            limits = {"limit": MAX_OUTPUT_BYTES, "seconds": seconds}
            request = json.dumps({"source": self._source, "variables": variables, **limits})
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the messages cannot be given to the chat template: {self._plain(error)}") from None
        with self._lock:
            reply = self._ask(request.encode("utf-8", "surrogatepass"), seconds)
        if "error" in reply:
            raise TemplateError(f"the chat template refused the messages: {self._plain(reply['error'])}")
        text: str = reply["text"]
        return text

    def _plain(self, problem: object) -> str:
        """Return text without secret spellings, for display."""
        text = str(problem)
        for plain, secret in self._marks.items():
            text = text.replace(secret, plain)
        return "".join(char for char in text if not "\ue000" <= char <= "\uf8ff")

    def _ask(self, data: bytes, seconds: float) -> dict[str, Any]:
        process = self._start()
        timer = threading.Timer(seconds, process.kill)
        try:
            if process.stdin is None or process.stdout is None:
                raise TemplateError("the template renderer has no pipes")
            timer.start()
            process.stdin.write(len(data).to_bytes(8, "little") + data)
            process.stdin.flush()
            size = int.from_bytes(_exactly(process.stdout, 8), "little")
            reply: dict[str, Any] = json.loads(_exactly(process.stdout, size))
        except (OSError, EOFError):
            self.close()
            message = f"the chat template did not finish within {seconds:.1f} s or ran out of memory"
            raise TemplateError(message, "use another template") from None
        except BaseException:
            self.close()  # a late reply must not be taken for the reply to the next request
            raise
        finally:
            timer.cancel()
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            command = [sys.executable, "-P", str(Path(__file__).with_name("render.py"))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            if self._process.stdout is None or not self._process.stdout.read(1):  # it reports when it is ready
                raise TemplateError("the template renderer did not start", "is jinja2 installed?")
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # the pipe of a killed process may be broken
        process.wait()

    def __del__(self) -> None:
        self.close()


def _exactly(pipe: Any, size: int) -> bytes:
    data: bytes = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
