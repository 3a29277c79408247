"""The automatic disk tier: saves the KV cache of long prompts when they finish, and loads it for later requests."""

from sala.engine.cache import Hybrid, SequenceState
from sala.engine.store.sessions import SessionStore
from sala.protocol import Executor

MIN_TOKENS = 256  # shorter prefixes are computed faster than loaded


class DiskTier:
    """`fetch` runs before and `keep` after every request. Requests with a salt are not written to disk."""

    def __init__(self, store: SessionStore, hybrid: Hybrid, executor: Executor, agreement_len: int) -> None:
        self._store = store
        self._hybrid = hybrid
        self._executor = executor
        self._agreement_len = agreement_len

    def fetch(self, sequence: SequenceState) -> None:
        """Load the saved prefix of a request, if it is longer than the cached one."""
        if sequence.request.salt:
            return
        tokens = bytes(sequence.token_bytes)
        known = self._hybrid.prefix.find(tokens, sequence.sparse_from, "")
        length = known.length if known else 0
        self._store.fetch(tokens, sequence.sparse_from, self._agreement_len, length, self._hybrid, self._executor)

    def keep(self, sequence: SequenceState) -> None:
        """Save the prompt without its last token: the next turn, or the same question again, begins with it."""
        length = sequence.prompt_len - 1
        if length < MIN_TOKENS or sequence.request.salt:
            return
        snapshot = self._hybrid.prefix.has(bytes(sequence.token_bytes), length, sequence.sparse_from, "")
        if snapshot is not None:
            self._store.keep(snapshot, self._executor)
