"""Clients of every kind at once: they ask, leave, send nonsense, download, load and switch models, and compare."""

import asyncio
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil

from tests.chaos.cases import BAD, CHAT, Case, make_cases, read, reduce, words

REPO = "org/model"
FETCHED, SECOND = "org--model", "second"
RETRY_S = 0.2
MAX_TRIES = 600
TIMEOUT_S = 300  # where other programs run, a request may take long
IN_FLIGHT_S = 0.5  # a request that was sent so long before SIGTERM has reached the server
MAX_IDLE = 8  # connections that are kept for later
MAX_WRONG = 20  # that are kept
BUSY = "answering requests"  # another model is; the words are the same in all APIs
NOT_LOADED = "model_not_loaded"
LITTLE_MEMORY = 1 << 30  # that the whole machine has free; a server then refuses to load a model
ENDING = ("shutting down", "the engine has stopped", "the model has been closed")


def has_failed(document: Any) -> bool:
    """Return whether a document is an error, or the event of a response that has failed."""
    return isinstance(document, dict) and bool(document.get("error") or has_failed(document.get("response")))


class Refused(Exception):
    """An answer that is not meant, or that is different."""


@dataclass
class Load:
    """The clients, and what they have seen."""

    url: str
    keys: dict[str, str]
    pause_s: float
    cases: list[Case] = field(default_factory=make_cases)
    expected: dict[tuple[str, str | None], Any] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    server_errors: Counter[str] = field(default_factory=Counter)  # by status and cause, and which end was announced
    wrong: list[str] = field(default_factory=list)
    is_over: bool = False
    ending: str = ""  # how the server is about to end: excuses what that breaks
    ending_since: float = 0.0
    disk_hurt_at: float = -math.inf  # when the disk was last without space, or read-only; now: infinite

    def __post_init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.num_active = 0
        self.connect()

    def connect(self) -> None:
        """Forget all connections: the server is another one."""
        limits = httpx2.Limits(max_connections=64, max_keepalive_connections=MAX_IDLE)
        self._client = httpx2.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, trust_env=False, limits=limits)

    async def disconnect(self) -> None:
        await self._client.aclose()
        self.connect()

    # one request

    async def send(self, method: str, path: str, key: str = "admin", **options: Any) -> tuple[int, str]:
        """Return status and text. What an announced end of the server breaks is sent again."""
        headers = {"authorization": f"Bearer {self.keys.get(key, key)}", "content-type": "application/json"}
        for _ in range(MAX_TRIES):
            began = time.monotonic()
            try:
                answer = await self._client.request(method, path, headers=headers, **options)
            except httpx2.TransportError as error:
                self._excuse(began, f"{method} {path}: {type(error).__name__}")
            else:
                self._count(answer.status_code, answer.text)
                if not self._is_from_an_end(answer.status_code, answer.text, began):
                    return answer.status_code, answer.text
            await asyncio.sleep(RETRY_S)
        raise Refused(f"{method} {path} was never answered")

    def _count(self, status: int, text: str) -> None:
        self.statuses[str(status)] += 1
        if status >= 500:
            cause = "another model is busy" if BUSY in text else text[:100]
            self.server_errors[f"{self.ending or 'load'}: {status} {cause}"] += 1

    def _excuse(self, began: float, what: str) -> None:
        """Count a broken connection; raise Refused unless the end of the server explains it."""
        is_drained = self.ending == "SIGTERM" and began < self.ending_since - IN_FLIGHT_S
        if not self.ending or is_drained:
            raise Refused(what)
        self.outcomes["broken by an announced end"] += 1

    def _is_from_an_end(self, status: int, text: str, began: float) -> bool:
        if status < 500:
            return False
        if any(words in text for words in ENDING):
            self._excuse(began, f"{status}: {text[:200]}")
            return True
        return False

    async def ask(self, case: Case, key: str, model: str | None = None) -> dict[str, Any]:
        """Return what is compared of an answer, asking again while other models are busy."""
        body = {**case.body, **({"model": model} if model else {})}
        for _ in range(MAX_TRIES):
            began = time.monotonic()
            status, text = await self.send("POST", case.path, key, json=body)
            if status == 503 and BUSY in text:
                self.outcomes["busy, asked again"] += 1
                await asyncio.sleep(RETRY_S)
                continue
            if status == 429:
                self.outcomes["queue full, asked again"] += 1
                await asyncio.sleep(RETRY_S)
                continue
            if status == 503 and NOT_LOADED in text and psutil.virtual_memory().available < LITTLE_MEMORY:
                self.outcomes["no memory left by other programs, asked again"] += 1
                await asyncio.sleep(RETRY_S)
                continue
            if status != 200:
                raise Refused(f"{case.name}: {status} {text[:200]}")
            documents = read(case.is_stream, text)
            if '"error"' in text and any(map(has_failed, documents)):
                if self.ending and self.ending != "SIGTERM":
                    self._excuse(began, text)
                    continue
                raise Refused(f"{case.name}: {text[-200:]}")
            return reduce(documents)
        raise Refused(f"{case.name} was never answered")

    async def learn(self, model: str | None, cases: list[Case] | None = None) -> None:
        """Remember the answers of a server that does nothing else."""
        for case in cases or self.cases:
            self.expected[case.name, model] = await self.ask(case, "admin", model)

    async def learn_fetched(self) -> None:
        """Remember the one answer that is asked of the model that is downloaded."""
        job = await self._fetch(is_cancelled=False)
        if job["status"] != "done":
            raise Refused(f"the download failed: {job}")
        await self._manage("POST", "/v1/models/load", json={"model": FETCHED})
        await self.learn(FETCHED, self.cases[:1])
        await self._manage("POST", "/v1/models/unload", json={"model": FETCHED})
        await self._manage("DELETE", f"/v1/models/{FETCHED}")

    async def compare(self, case: Case, key: str, model: str | None = None) -> None:
        found, wanted = await self.ask(case, key, model), self.expected[case.name, model]
        if found != wanted:
            where = next(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
            raise Refused(f"{case.name} of {model}: {found.get(where)!r} is not {wanted.get(where)!r} ({where})")
        self.outcomes[f"{case.kind}: equal"] += 1

    # clients

    async def user(self, key: str, seed: int) -> None:
        """Ask, leave and send nonsense, until it is over."""
        rng = random.Random(seed)
        acts: list[tuple[int, str, Callable[[random.Random, str], Awaitable[None]]]] = [
            (16, "ask", lambda rng, key: self.compare(rng.choice(self.cases), key)),
            (3, "leave", self._leave),
            (3, "nonsense", self._send_nonsense),
            (1, "look", self._look),
        ]
        while not self.is_over:
            _, name, act = rng.choices(acts, [weight for weight, _, _ in acts])[0]
            await self.guard(name, lambda act=act: act(rng, key))  # type: ignore[misc]
            await asyncio.sleep(self.pause_s * rng.expovariate(1.0))

    async def guard(self, name: str, act: Callable[[], Awaitable[None]]) -> None:
        """Do something unless all are to be quiet, and keep what goes wrong."""
        await self._open.wait()
        self.num_active += 1
        try:
            await act()
        except Refused as problem:
            self.outcomes["WRONG"] += 1
            self.wrong = [*self.wrong, f"{name}: {problem}"][:MAX_WRONG]
            print(f"{time.strftime('%H:%M:%S')} {name}: {problem}", file=sys.stderr, flush=True)
        finally:
            self.num_active -= 1

    async def _leave(self, rng: random.Random, key: str) -> None:
        """Disconnect in the queue, while the prompt is computed, or within the answer."""
        text = words(rng.choice((10, 300)), rng.randrange(50))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 400, "ignore_eos": True}
        headers = {"authorization": f"Bearer {self.keys[key]}"}
        num_lines, began = rng.choice((0, 1, 10, 40)), time.monotonic()
        try:
            async with asyncio.timeout(rng.choice((0.02, 0.3, 20))):
                stream = self._client.stream("POST", CHAT, json={**body, "stream": num_lines > 0}, headers=headers)
                async with stream as answer:
                    if answer.status_code >= 500:
                        text = (await answer.aread()).decode()
                        self._count(answer.status_code, text)
                        if BUSY not in text and not self._is_from_an_end(answer.status_code, text, began):
                            raise Refused(f"leaving: {answer.status_code} {text[:200]}")
                        return
                    self.statuses[str(answer.status_code)] += 1
                    async for _ in answer.aiter_lines():
                        num_lines -= 1
                        if num_lines < 0:
                            break
        except TimeoutError:
            pass
        except httpx2.TransportError as error:
            self._excuse(began, f"{type(error).__name__} while leaving")
        self.outcomes["cancelled"] += 1

    async def _send_nonsense(self, rng: random.Random, key: str) -> None:
        path, body = rng.choice(BAD)
        status, text = await self.send("POST", path, rng.choice((key, key, "sala-wrong-key")), content=body)
        if status == 503 and BUSY in text:
            self.outcomes["busy, not asked again"] += 1
            return
        if not 400 <= status < 500:
            raise Refused(f"{body[:60]!r} to {path}: {status} {text[:200]}")
        self.outcomes["bad body: refused"] += 1

    async def _look(self, rng: random.Random, key: str) -> None:
        path = rng.choice(("/v1/models", "/metrics", "/health", "/openapi.json", "/"))
        status, text = await self.send("GET", path, key)
        if status != 200 and not (status == 503 and ("loading" in text or self.ending)):
            raise Refused(f"GET {path}: {status} {text[:200]}")
        self.outcomes["look"] += 1

    # the administrator

    async def administrator(self, seed: int, pause_s: float) -> None:
        """Download, load, switch, unload and delete models, one after the other."""
        rng = random.Random(seed)
        while not self.is_over:
            await self.guard("download", lambda: self._download(rng))
            await asyncio.sleep(pause_s * rng.expovariate(1.0))
            await self.guard("switch", lambda: self._switch(rng))
            await asyncio.sleep(pause_s * rng.expovariate(1.0))

    async def _switch(self, rng: random.Random) -> None:
        """Ask another model, for which an idle one is unloaded."""
        await self.compare(rng.choice(self.cases), "admin", SECOND)
        self.outcomes["switch"] += 1

    async def _download(self, rng: random.Random) -> None:
        """Download a model, sometimes with a break; load it beside the others, ask it, unload and delete it."""
        for attempt in range(MAX_TRIES):
            began = time.monotonic()
            job = await self._fetch(is_cancelled=attempt == 0 and rng.random() < 0.3)
            if job is None or job["status"] == "done":
                break
            if job["status"] == "failed" and began > self.disk_hurt_at:
                raise Refused(f"the download failed: {job['error']}")
            self.outcomes[f"download: {job['status']}"] += 1
            await asyncio.sleep(RETRY_S)
        await self._manage("POST", "/v1/models/load", json={"model": FETCHED})
        await self.compare(self.cases[0], "admin", FETCHED)
        await self._manage("POST", "/v1/models/unload", json={"model": FETCHED})
        await self._manage("DELETE", f"/v1/models/{FETCHED}")
        self.outcomes["download: used"] += 1

    async def _fetch(self, is_cancelled: bool) -> Any:
        """Return the job when it is over; None if the model is there already."""
        status, text = await self.send("POST", "/v1/models/download", json={"repo_id": REPO})
        if status == 409 and "model_exists" in text:
            return None
        if status != 202:
            raise Refused(f"download: {status} {text[:200]}")
        job = read(False, text)[0]["job"]
        path = f"/v1/models/download/{job['id']}"
        if is_cancelled:
            await self.send("DELETE", path)
        while job["status"] in ("queued", "running"):
            await asyncio.sleep(RETRY_S)
            status, text = await self.send("GET", path)
            if status == 404:  # the server that knew it has ended
                return {"status": "forgotten"}
            job = read(False, text)[0]
        return job

    async def _manage(self, method: str, path: str, **options: Any) -> None:
        """Load, unload or delete; what is busy or gone since the server has ended is tried again, or done."""
        for _ in range(MAX_TRIES):
            began = time.monotonic()
            status, text = await self.send(method, path, **options)
            if status == 200 or (status == 404 and self.outcomes["ends"]):
                return
            is_hurt = began < self.disk_hurt_at  # when it was sent, however late the answer has come
            if not ("model_busy" in text or is_hurt or ("model_loaded" in text and self.outcomes["ends"])):
                raise Refused(f"{method} {path}: {status} {text[:200]}")
            if "model_loaded" in text:
                await self.send("POST", "/v1/models/unload", json={"model": FETCHED})
            await asyncio.sleep(RETRY_S)
        raise Refused(f"{method} {path} was never possible")

    # pauses

    async def quiet(self) -> None:
        """Let nobody begin anything, and wait until nobody does anything."""
        self._open.clear()
        while self.num_active:
            await asyncio.sleep(0.02)

    def go_on(self) -> None:
        self._open.set()
