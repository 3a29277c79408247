"""Files over HTTP from a host that is not trusted: where a redirect may lead, how much may come, what a rest must show.

The standard library is enough for this, and nothing in it unpacks a body or follows a redirect behind our back.
"""

import contextlib
import errno
import functools
import hashlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from sala.errors import SalaError

CHUNK_BYTES = 1 << 20
CONNECT_SECONDS = 15.0
MAX_REDIRECTS = 5
MAX_WAIT_SECONDS = 60.0
PROGRESS_BYTES = 1 << 20  # so much must arrive for a broken transfer to count as alive
CDN_DOMAINS = ("huggingface.co", "hf.co")
# Proxies that route by name hand out addresses of this network for every public host.
NAME_ROUTED = ipaddress.ip_network("198.18.0.0/15")
_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class DownloadError(SalaError):
    """A model could not be fetched; what has arrived stays for another try."""


class DiskFull(DownloadError):
    """The disk has no room for the files."""


class Cancelled(DownloadError):
    """Someone stopped it."""


class Broken(Exception):
    """This try failed and another may do better."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        self.wait = wait
        super().__init__(reason)


class Stop:
    """Ends a transfer from another thread, also one that waits for bytes."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._socket: socket.socket | None = None

    def set(self) -> None:
        self._event.set()
        if (waiting := self._socket) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(waiting, socket.SHUT_RDWR)  # the plain one: TLS must not say goodbye first

    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        if self._event.is_set():
            raise Cancelled("the download was cancelled", "start it again and it goes on where it stopped")

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
        self.check()

    def watch(self, connected: socket.socket) -> None:
        self._socket = connected
        self.check()


class Client:
    """Requests to one hub and to where its files lie."""

    def __init__(
        self, url: str, token: str | None, timeout: float = 60.0, friends: Sequence[str] = (), tries: int = 5,
        delay: float = 1.0,
    ) -> None:  # fmt: skip
        self.url = url.rstrip("/")
        self.hub = _split(self.url)
        self.is_local = is_loopback(self.hub.hostname or "")
        self.timeout = timeout
        self.friends = tuple(friends)
        self.tries = tries
        self.delay = delay
        self._token = token if self.hub.scheme == "https" or self.is_local else None  # never in clear text

    def open(self, url: str, headers: Mapping[str, str], stop: Stop) -> http.client.HTTPResponse:
        """The answer to a GET, whatever its status, after redirects that are allowed."""
        for _ in range(MAX_REDIRECTS + 1):
            response = self._send(url, headers, stop)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            location = response.headers.get("Location", "")
            response.close()
            url = urljoin(url, location)
            self.check_target(url)
        raise DownloadError(f"{self.hub.hostname} redirects without end")

    def check_target(self, url: str) -> None:
        """A redirect may lead to the hub itself and to its storage, never to other hosts or into this network."""
        target = _split(url)
        host = target.hostname or ""
        is_hub = (host, target.port) == (self.hub.hostname, self.hub.port)
        may_be_plain = (self.is_local and is_loopback(host)) or (is_hub and self.hub.scheme == "http")
        if target.scheme != "https" and not (target.scheme == "http" and may_be_plain):
            raise DownloadError(f"the hub redirects to {target.scheme}: at {_shown(host)}, which is refused")
        if not self._is_storage(host):
            raise DownloadError(
                f"the hub redirects to {_shown(host)}, which is not one of its own hosts",
                "if you trust that host, name it in SALA_HUB_HOSTS",
            )
        if not is_hub and not self.is_local and host not in self.friends:
            with contextlib.suppress(ValueError):
                check_address(str(ipaddress.ip_address(host)))

    def _is_storage(self, host: str) -> bool:
        if self.is_local:
            return is_loopback(host)
        domains = (self.hub.hostname or "", *CDN_DOMAINS, *self.friends)
        return any(host == domain or host.endswith("." + domain) for domain in domains)

    def _send(self, url: str, headers: Mapping[str, str], stop: Stop) -> http.client.HTTPResponse:
        stop.check()
        target = _split(url)
        sent = {"Accept-Encoding": "identity", "User-Agent": "sala", **headers}
        if self._token and (target.scheme, target.netloc) == (self.hub.scheme, self.hub.netloc):
            sent["Authorization"] = f"Bearer {self._token}"
        is_known = target.hostname == self.hub.hostname or target.hostname in self.friends
        opener = urllib.request.OpenerDirector()
        opener.add_handler(urllib.request.ProxyHandler({} if self.is_local else None))
        kind = _Secure if target.scheme == "https" else _Plain
        opener.add_handler(kind(stop, self.timeout, not is_known and not self.is_local))
        try:
            request = urllib.request.Request(url, headers=sent)  # noqa: S310, the scheme was checked
            answer = opener.open(request, timeout=CONNECT_SECONDS)
        except (OSError, http.client.HTTPException) as error:
            stop.check()
            raise _explain(error, target.hostname or "") from None
        if not isinstance(answer, http.client.HTTPResponse):
            raise DownloadError(f"{_shown(target.hostname or '')} does not speak HTTP")
        return answer


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, stop: Stop, timeout: float, is_stranger: bool) -> None:
        super().__init__()
        self._guard = functools.partial(_guard, stop=stop, timeout=timeout, is_stranger=is_stranger)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_PlainConnection, guard=self._guard(request=req)), req)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, stop: Stop, timeout: float, is_stranger: bool) -> None:
        super().__init__(context=_tls())
        self._guard = functools.partial(_guard, stop=stop, timeout=timeout, is_stranger=is_stranger)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        kind = functools.partial(_SecureConnection, guard=self._guard(request=req))
        return self.do_open(kind, req, context=_tls())


class _PlainConnection(http.client.HTTPConnection):
    def __init__(self, *arguments: Any, guard: Callable[[socket.socket], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._guard = guard

    def connect(self) -> None:
        super().connect()
        self._guard(self.sock)


class _SecureConnection(http.client.HTTPSConnection):
    def __init__(self, *arguments: Any, guard: Callable[[socket.socket], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._guard = guard

    def connect(self) -> None:
        super().connect()
        self._guard(self.sock)


def _guard(
    stop: Stop, timeout: float, is_stranger: bool, request: urllib.request.Request
) -> Callable[[socket.socket], None]:
    """What is done with a connection before anything is asked through it."""
    is_proxied = request.host != urlsplit(request.full_url).netloc

    def check(connected: socket.socket) -> None:
        connected.settimeout(timeout)
        if is_stranger and not is_proxied:  # by the address it really has, so that DNS cannot tell two stories
            check_address(connected.getpeername()[0])
        stop.watch(connected)

    return check


@functools.cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not context.get_ca_certs():  # some installations of Python come without
        with contextlib.suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())
    return context


def _explain(error: Exception, host: str) -> Exception:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DownloadError(
            f"the certificate of {_shown(host)} is not trusted here", "set SSL_CERT_FILE to your network's certificates"
        )
    if isinstance(reason, TimeoutError):
        return Broken(f"{_shown(host)} does not answer")
    return Broken(f"{_shown(host)} cannot be reached ({type(reason).__name__})")


def _split(url: str) -> SplitResult:
    """The parts of a URL that no two parsers can read differently."""
    if not re.fullmatch(r"[\x21-\x7e]{1,8192}", url) or "\\" in url:
        raise DownloadError("the hub gives an address that is no plain URL")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise DownloadError("the hub gives an address that is no URL") from None
    if "@" in parts.netloc or port == 0:
        raise DownloadError("the hub gives an address with a user name or an impossible port in it")
    return parts


def _shown(host: str) -> str:
    return host[:100] or "nowhere"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str) -> None:
    """Refuse what is not on the public internet: this machine, its network, a cloud's inside."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    if found.version == 4 and found in NAME_ROUTED:
        return
    if not found.is_global or found.is_multicast:
        raise DownloadError(f"the hub redirects to {found}, which is not on the public internet")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository, as the hub declares it: one of the two hashes is there."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None  # of the blob as git counts it


class Draft:
    """A file on its way: its bytes so far, their hashes, and the ETag they came with."""

    def __init__(self, path: Path, file: RemoteFile, stop: Stop) -> None:
        self.file = file
        self.path = path
        self._etag_path = path.with_name(path.name + ".etag")
        with _writing(path):
            self._handle = path.open("r+b" if path.exists() else "x+b")
        self._begin()
        if os.fstat(self._handle.fileno()).st_size > file.size:
            self.restart()
        while chunk := self._handle.read(CHUNK_BYTES):
            stop.check()
            self._count(chunk)

    def _begin(self) -> None:
        self.size = 0
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % self.file.size, usedforsecurity=False)

    def _count(self, chunk: bytes) -> None:
        self.size += len(chunk)
        self._sha256.update(chunk)
        if self.file.sha256 is None:
            self._git.update(chunk)

    @property
    def etag(self) -> str | None:
        try:
            return self._etag_path.read_text(encoding="latin-1") or None
        except OSError:
            return None

    @etag.setter
    def etag(self, value: str | None) -> None:
        with _writing(self._etag_path):
            self._etag_path.write_text(value or "", encoding="latin-1")

    def restart(self) -> None:
        self._handle.seek(0)
        self._handle.truncate()
        self._begin()

    def write(self, chunk: bytes) -> None:
        with _writing(self.path):
            self._handle.write(chunk)
        self._count(chunk)

    @property
    def is_complete(self) -> bool:
        return self.size == self.file.size

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def is_right(self) -> bool:
        if self.file.sha256 is not None:
            return self.is_complete and self.sha256 == self.file.sha256
        return self.is_complete and self._git.hexdigest() == self.file.git_sha1

    def close(self) -> None:
        with _writing(self.path):
            self._handle.close()

    def finish(self, target: Path) -> None:
        """Give the file its name; what is not what it should be is put aside."""
        with _writing(self.path):
            self._handle.flush()
            os.fsync(self._handle.fileno())
            self._handle.close()
            self._etag_path.unlink(missing_ok=True)
            if self.is_right():
                self.path.replace(target)
                return
            self.path.replace(target.with_name(target.name + ".bad"))
        raise DownloadError(
            f"{self.file.name} is not what the hub declares: its hash is another", "fetch it again; it was put aside"
        )


@contextlib.contextmanager
def _writing(path: Path) -> Any:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the disk is full while {path.name} is written", "make room and start again; what has arrived is kept"
            ) from None
        raise DownloadError(f"{path.name} cannot be written: {error.strerror}") from None


def fetch(client: Client, url: str, draft: Draft, stop: Stop, report: Callable[[int], None]) -> None:
    """Bring the rest of a file, over as many connections as it takes."""
    failures, best = 0, draft.size
    while not draft.is_complete:
        try:
            _attempt(client, url, draft, stop, report)
        except (Broken, OSError, http.client.HTTPException) as error:
            stop.check()
            failures = 1 if draft.size >= best + PROGRESS_BYTES else failures + 1
            best = max(best, draft.size)
            if failures >= client.tries:
                reason = str(error) if isinstance(error, Broken) else _reason(error)
                raise DownloadError(
                    f"{draft.file.name} does not arrive: {reason}", "try again later; what has arrived is kept"
                ) from None
            wait = error.wait if isinstance(error, Broken) and error.wait is not None else None
            stop.wait(min(MAX_WAIT_SECONDS, client.delay * 2 ** (failures - 1) if wait is None else wait))


def _attempt(client: Client, url: str, draft: Draft, stop: Stop, report: Callable[[int], None]) -> None:
    headers = {}
    if draft.size:
        headers["Range"] = f"bytes={draft.size}-"
        if draft.etag and not draft.etag.startswith("W/"):
            headers["If-Range"] = draft.etag
    with contextlib.closing(client.open(url, headers, stop)) as response:
        _prepare(response, draft)
        while chunk := response.read1(CHUNK_BYTES):
            stop.check()
            if draft.size + len(chunk) > draft.file.size:
                draft.restart()
                raise DownloadError(f"{draft.file.name} is longer than the hub declares")
            draft.write(chunk)
            report(draft.size)
    stop.check()
    if not draft.is_complete:
        raise Broken("the connection breaks off")


def _prepare(response: http.client.HTTPResponse, draft: Draft) -> None:
    """Check that the body which follows is what the draft needs next, or begin anew."""
    status, name = response.status, draft.file.name
    if status == 416 and draft.size:
        draft.restart()
        raise Broken("the hub does not know the rest of it", 0)
    if status in _RETRY_STATUS:
        raise Broken(f"the hub answers {status}", _retry_after(response.headers.get("Retry-After")))
    if status in (401, 403):
        raise DownloadError(
            f"{name} is open only to those who accepted the model's terms",
            "accept them on the hub's page of the model, then set HF_TOKEN",
        )
    if status not in (200, 206):
        raise DownloadError(f"{name} cannot be fetched: the hub answers {status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise DownloadError(f"{name} comes packed, though it was asked for as it is")
    etag = response.headers.get("ETag", "")[:1000]
    if status == 206:
        found = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", response.headers.get("Content-Range", ""))
        is_same = not draft.etag or not etag or etag == draft.etag
        if found is None or int(found[1]) != draft.size or found[2] not in ("*", str(draft.file.size)) or not is_same:
            if not draft.size:
                raise DownloadError(f"{name} comes in part, though it was asked for whole")
            draft.restart()
            raise Broken("the file has changed on the hub", 0)
        return
    if draft.size:
        draft.restart()
    if response.length is not None and response.length != draft.file.size:
        raise DownloadError(f"{name} has {response.length:,} bytes; the hub declares {draft.file.size:,}")
    draft.etag = etag


def _retry_after(text: str | None) -> float | None:
    return float(text) if text and re.fullmatch(r"\d{1,6}", text) else None


def _reason(error: Exception) -> str:
    return "no bytes come any more" if isinstance(error, TimeoutError) else "the connection breaks off"


def read_answer(client: Client, url: str, max_bytes: int, stop: Stop) -> tuple[int, Message, bytes]:
    """Status, headers and body of a small answer; one more try if the first breaks."""
    try:
        return _read_answer(client, url, max_bytes, stop, retried=_RETRY_STATUS)
    except (Broken, OSError, http.client.HTTPException) as error:
        wait = error.wait if isinstance(error, Broken) and error.wait is not None else client.delay
        stop.wait(min(MAX_WAIT_SECONDS, wait))
    try:
        return _read_answer(client, url, max_bytes, stop, retried=frozenset())
    except (Broken, OSError, http.client.HTTPException) as error:
        stop.check()
        reason = str(error) if isinstance(error, Broken) else _reason(error)
        raise DownloadError(f"the hub does not answer: {reason}", "see whether this machine is online") from None


def _read_answer(
    client: Client, url: str, max_bytes: int, stop: Stop, retried: frozenset[int]
) -> tuple[int, Message, bytes]:
    with contextlib.closing(client.open(url, {"Accept": "application/json"}, stop)) as response:
        if response.status in retried:
            raise Broken("busy", _retry_after(response.headers.get("Retry-After")))
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise DownloadError(f"{client.hub.hostname} answers packed, though that was not asked for")
        body = response.read(max_bytes + 1)
        if len(body) > max_bytes:
            raise DownloadError(f"{client.hub.hostname} answers without end")
        stop.check()
        if response.length:
            raise Broken("the connection breaks off")
        return response.status, response.headers, body
