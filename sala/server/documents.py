"""Documents that clients upload: read in the process of `sala ask`, counted, and kept for the key that wants it.

A process reads one file at a time, and one file of each key is read at a time: a hostile file delays those of its own
key only. What is kept is the text, as a file with the purpose `document`; the upload itself is not.
"""

import asyncio
import json
import shutil
import tempfile
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from sala.documents.layout import Layout, lay_out
from sala.documents.model import clean_name
from sala.documents.reader import DocumentSet, read_file
from sala.errors import ContextTooLong, QueueFull
from sala.llm import LLM
from sala.server.files import MAX_NAME, FileStore, StoredFile
from sala.server.http.errors import ApiError
from sala.text.sources import PromptText
from sala.text.workers import SandboxProcess

PURPOSE = "document"
NUM_READERS = 2
MAX_WAITING = 16  # uploads of one owner that wait to be read
MAX_S = 120.0  # in which a file must be read
MAX_CONTEXTS = 2  # longer documents are refused: counting their tokens takes long, and no prompt takes them
MAX_REMEMBERED = 1 << 23  # token ids of kept documents in memory
CHILD = Path(__file__).parents[1] / "documents" / "child.py"


class DocumentReader:
    """Reads uploads in processes with limits."""

    def __init__(self) -> None:
        self._workers = [SandboxProcess(program=CHILD) for _ in range(NUM_READERS)]
        self._idle = list(self._workers)
        self._began: dict[SandboxProcess, float] = {}  # when each that is at work began with its file
        self._pool = ThreadPoolExecutor(NUM_READERS, "sala-documents")
        self._turns: dict[str, asyncio.Lock] = {}  # by owner
        self._waiting: Counter[str] = Counter()  # by owner, with the one that is being read

    @property
    def num_waiting(self) -> int:
        """How many uploads wait to be read."""
        return max(0, self._waiting.total() - len(self._began))

    @property
    def age_s(self) -> float:
        """How many seconds ago the reading of a file should have ended that has not."""
        now = time.monotonic()
        return max((now - began - MAX_S for began in list(self._began.values())), default=0.0)

    async def read(self, owner: str, name: str, source: BinaryIO) -> DocumentSet:
        """Return the documents in a file. Raises QueueFull.

        A client that leaves does not stop the reading: until it has ended, its next file waits.
        """
        if self._waiting[owner] >= MAX_WAITING:
            raise QueueFull(self._waiting[owner])
        copy = await asyncio.to_thread(_copy, source)
        return await asyncio.shield(self._wait(owner, name, copy))

    async def _wait(self, owner: str, name: str, copy: Any) -> DocumentSet:
        turn = self._turns.setdefault(owner, asyncio.Lock())
        self._waiting[owner] += 1
        try:
            async with turn:
                return await asyncio.get_running_loop().run_in_executor(self._pool, self._read, name, copy)
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._turns[owner], self._waiting[owner]

    def _read(self, name: str, copy: Any) -> DocumentSet:
        worker = self._idle.pop()
        self._began[worker] = time.monotonic()
        try:
            with copy:
                return read_file(worker, copy.name, name, MAX_S)
        finally:
            del self._began[worker]
            self._idle.append(worker)

    def close(self) -> None:
        """Stop the processes, with what they read."""
        for worker in self._workers:
            worker.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _copy(source: BinaryIO) -> Any:
    """Return a copy that a process can open; it is deleted when closed."""
    copy = tempfile.NamedTemporaryFile(prefix="sala-")  # noqa: SIM115 - readable by this user only
    source.seek(0)
    shutil.copyfileobj(source, copy, 1 << 20)
    copy.flush()
    return copy


def describe(name: str, num_bytes: int, found: DocumentSet, llm: LLM) -> dict[str, Any]:
    """Return what a file holds: its documents as text, with tokens, sections and notes, and what was left out.

    Raises ApiError for a file without text, and for one that is much longer than the context.
    """
    if not found.documents:
        why = found.left_out[0].why if found.left_out else "it holds no text"
        raise ApiError(400, f"{clean_name(name)}: {why}", param="file", code="unreadable_document")
    layouts = [lay_out(document) for document in found.documents]
    try:
        llm.tokenizer.check_length("".join(one.text for one in layouts), MAX_CONTEXTS * llm.ctx)
    except ContextTooLong as error:
        message = f"{clean_name(name)}: it has more than {error.num_tokens:,} tokens, and the context holds {llm.ctx:,}"
        remedy = "split it, or use sala ask, which reads it in parts"
        raise ApiError(400, f"{message}; {remedy}", param="file", code="document_too_long") from None
    documents = [_describe(one, llm) for one in layouts]
    return {
        "object": "document",
        "filename": name,
        "bytes": num_bytes,
        "tokens": sum(one["tokens"] for one in documents),
        "documents": documents,
        "left_out": [asdict(one) for one in found.left_out],
    }


def _describe(layout: Layout, llm: LLM) -> dict[str, Any]:
    (ids, ends), *_ = llm.tokenizer.encode_with_ends([layout.text])
    counts = layout.count_tokens(ends)
    sections = [{**asdict(one), "tokens": count} for one, count in zip(layout.stretches, counts, strict=True)]
    return {"name": layout.name, "tokens": len(ids), "notes": layout.notes, "text": layout.text, "sections": sections}


class KeptDocuments:
    """The documents that keys keep, among their files."""

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self._prompts: OrderedDict[tuple[str, ...], DocumentPrompt] = OrderedDict()  # the last used one last
        self._lock = threading.Lock()

    def add(self, owner: str, described: dict[str, Any]) -> dict[str, Any]:
        """Keep a document and return it with its id. Raises ApiError if the owner has too much already."""
        facts = {name: described[name] for name in ("bytes", "tokens")}
        facts["sections"] = sum(len(one["sections"]) for one in described["documents"])
        with tempfile.SpooledTemporaryFile(max_size=1 << 20) as copy:
            copy.write(dump_text(described))
            file = self.files.add(owner, described["filename"][:MAX_NAME], PURPOSE, copy, facts=facts)
        return {**self.show(file), **described}

    def owned(self, owner: str) -> list[StoredFile]:
        return [file for file in self.files.owned(owner) if file.purpose == PURPOSE]

    def find(self, owner: str, document_id: str) -> StoredFile:
        """Return a document of an owner. Raises ApiError if there is none."""
        file = next((one for one in self.owned(owner) if one.id == document_id), None)
        if file is None:
            message = "there is no such document; GET /v1/documents lists them"
            raise ApiError(404, message, param="document_id", code="document_not_found")
        return file

    def show(self, file: StoredFile) -> dict[str, Any]:
        """Return a document as lists have it."""
        facts = {name: file.facts.get(name, 0) for name in ("bytes", "tokens", "sections")}
        times = {"created_at": int(file.created), "expires_at": file.expires_at}
        return {"id": file.id, "object": "document", "filename": file.filename, **facts, **times}

    def read(self, file: StoredFile) -> dict[str, Any]:
        """Return a document with its text. Raises ApiError if it has just been deleted."""
        try:
            kept: dict[str, Any] = json.loads(self.files.path(file).read_bytes())
        except FileNotFoundError:
            raise ApiError(404, "the document was deleted", param="document_id", code="document_not_found") from None
        return {**kept, **self.show(file)}

    def prompt(self, files: Sequence[StoredFile], system: str, llm: LLM) -> "DocumentPrompt":
        """Return the tokens of a conversation that begins with documents."""
        key = (llm.tokenizer.fingerprint, system, *(file.id for file in files))
        with self._lock:
            prompt = self._prompts.pop(key, None)
        if prompt is None:
            texts = ["".join(one["text"] for one in self.read(file)["documents"]) for file in files]
            prompt = _encode(texts, system, llm)
        with self._lock:
            self._prompts[key] = prompt
            while sum(len(one.ids) for one in self._prompts.values()) > MAX_REMEMBERED and len(self._prompts) > 1:
                self._prompts.popitem(last=False)
        return prompt


@dataclass(frozen=True, slots=True)
class DocumentPrompt:
    """The tokens of a conversation that begins with documents, and at which of them each document begins and ends."""

    ids: "array[int]"
    spans: list[tuple[int, int]]

    def count_cached(self, cached: int) -> list[tuple[int, int]]:
        """Return the tokens of each document, and how many of them are among the first `cached` of the prompt."""
        return [(end - start, min(max(0, cached - start), end - start)) for start, end in self.spans]


def _encode(texts: Sequence[str], system: str, llm: LLM) -> DocumentPrompt:
    opening = [{"role": "system", "content": system}] if system else []
    messages = [*opening, {"role": "user", "content": "".join(texts)}]
    ids = array("I", llm.encode_chat(messages))
    prompt = PromptText(llm.tokenizer, ids, messages)
    begin = next((region.start for region in prompt.regions if region.message == len(messages) - 1), 0)
    bounds = [prompt.token_at(begin + length) for length in accumulate(map(len, texts), initial=0)]
    return DocumentPrompt(ids, list(pairwise(bounds)))


def dump_text(value: Any) -> bytes:
    """Return JSON in UTF-8: text that is not ASCII takes a third of what escapes take."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
