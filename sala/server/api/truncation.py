"""Leave out the oldest turns of a conversation that is longer than the context."""

from dataclasses import replace

from sala.engine.requests import InputProcessor
from sala.errors import ContextTooLong
from sala.server.api.conversation import ChatInput


def truncate(chat: ChatInput, inputs: InputProcessor, limit: int) -> ChatInput:
    """Return a conversation of at most `limit` tokens; system messages at its beginning and the last turn stay.

    A turn goes from a message of the user to the next one, so that no call loses its result.
    """
    messages = chat.messages
    first = next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))
    starts = [at for at, one in enumerate(messages) if one["role"] == "user" and at > first]

    def without(num_turns: int) -> ChatInput:
        begin = starts[num_turns - 1] if num_turns else first
        return replace(chat, messages=[*messages[:first], *messages[begin:]])

    def fits(num_turns: int) -> bool:
        try:
            return len(without(num_turns).encode(inputs)) <= limit
        except ContextTooLong:
            return False

    if fits(0):
        return chat
    low, high = 1, len(starts)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return without(min(low, len(starts)))
