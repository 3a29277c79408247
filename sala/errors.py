"""What a user may see: every error says what happened and what to do about it, in one line."""


class SalaError(Exception):
    """The root of all errors that are meant for a user. `remedy` is what to do next."""

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message}; {remedy}" if remedy else message)


class ConfigError(SalaError):
    """config.json describes a model that cannot exist or that we cannot run."""


class CheckpointError(SalaError):
    """The weight files are damaged, incomplete, or belong to another model."""


class ModelNotFound(SalaError):
    """No model at that place."""


class MissingExtra(SalaError):
    """An optional dependency is needed; the remedy is its pip command."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed", f"run: pip install 'minicpm-sala[{extra}]'")


class InputError(SalaError, ValueError):
    """A request asks for something impossible; `field` names what is wrong and `problem` says why."""

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field} {problem}", remedy)


class UnknownOption(SalaError, TypeError):
    """An argument that does not exist, with a suggestion."""

    def __init__(self, where: str, name: str, remedy: str) -> None:
        self.name = name
        super().__init__(f"{where} has no option {name[:100]!r}", remedy)


class ContextTooLong(SalaError):
    """The prompt does not fit; carries the numbers. One that is far too long is not counted to its end."""

    def __init__(self, num_tokens: int, max_tokens: int, is_whole: bool = True) -> None:
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        count = f"{num_tokens:,}" if is_whole else f"more than {num_tokens:,}"
        super().__init__(
            f"the prompt has {count} tokens and the context holds {max_tokens:,}",
            f"shorten it or raise the context (ctx) to at least {num_tokens + 1}",
        )


class TemplateError(SalaError):
    """The chat template is broken, hostile, or does not like the messages."""


class NoTokenizer(SalaError):
    """The checkpoint has no tokenizer files, and text was asked for."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} has no tokenizer.json", "pass token ids, or copy the tokenizer files there")


class CacheTooSmall(SalaError):
    """The KV cache cannot hold a request, even with nothing else in it."""

    def __init__(self) -> None:
        super().__init__(
            "the request does not fit into the KV cache", "give the cache more memory (cache_memory) or shorten it"
        )


class QueueFull(SalaError):
    """Too many requests wait already; carries their number."""

    def __init__(self, num_waiting: int) -> None:
        self.num_waiting = num_waiting
        super().__init__(f"{num_waiting} requests wait already", "try again later")


class SlowReader(SalaError):
    """A stream was not read fast enough: its request has been cancelled."""

    def __init__(self) -> None:
        super().__init__("the answer was not read fast enough and has been cancelled", "read the stream faster")


class EngineClosed(SalaError):
    """The model has been closed, or is being closed."""

    def __init__(self) -> None:
        super().__init__("the model has been closed", "load it again")


class EngineDead(SalaError):
    """The engine thread has ended after an error that no request can survive."""

    def __init__(self) -> None:
        super().__init__("the engine has stopped", "load the model again; after a fork, in the child process")
