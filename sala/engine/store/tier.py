"""The automatic disk tier: pasts of long prompts go to a store when they end, and come back when they are wanted."""

from sala.engine.cache import Hybrid, SequenceState
from sala.engine.store.sessions import SessionStore
from sala.protocol import Executor

MIN_TOKENS = 256  # shorter pasts are computed sooner than read


class DiskTier:
    """Put `fetch` before and `keep` after every request. Requests with a salt of their own stay off the disk."""

    def __init__(self, store: SessionStore, hybrid: Hybrid, executor: Executor, agreement_len: int) -> None:
        self._store = store
        self._hybrid = hybrid
        self._executor = executor
        self._agreement_len = agreement_len

    def fetch(self, sequence: SequenceState) -> None:
        """Bring in what the disk knows of a request's past, if that is more than the cache knows."""
        if sequence.request.salt:
            return
        tokens = bytes(sequence.token_bytes)
        known = self._hybrid.prefix.find(tokens, sequence.sparse_from, "")
        length = known.length if known else 0
        self._store.fetch(tokens, sequence.sparse_from, self._agreement_len, length, self._hybrid, self._executor)

    def keep(self, sequence: SequenceState) -> None:
        """The prompt without its last token: what the next turn, or the same question again, begins with."""
        length = sequence.prompt_len - 1
        if length < MIN_TOKENS or sequence.request.salt:
            return
        snapshot = self._hybrid.prefix.has(bytes(sequence.token_bytes), length, sequence.sparse_from, "")
        if snapshot is not None:
            self._store.keep(snapshot, self._executor)
