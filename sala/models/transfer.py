"""HTTP downloads from a hub that is not trusted: limits on redirects and sizes, and how downloads resume."""

import contextlib
import hashlib
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sala.errors import DiskFull, NotWritable, SalaError, writing

if TYPE_CHECKING:
    import httpx2

CHUNK_BYTES = 1 << 20
CONNECT_SECONDS = 15.0
MAX_REDIRECTS = 5
MAX_URL = 8192  # characters
MAX_WAIT_SECONDS = 60.0
PROGRESS_BYTES = 1 << 20  # after this much progress failures are counted from zero again
STORAGE_DOMAINS = ("huggingface.co", "hf.co", "modelscope.cn")
# Some proxies route by name and hand out addresses of this network for every public host.
NAME_ROUTED = ipaddress.ip_network("198.18.0.0/15")
_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class DownloadError(SalaError):
    """A model could not be downloaded; what has been downloaded is kept for another try."""


class DownloadDiskFull(DownloadError, DiskFull):
    """The disk has no room for the files of a model."""


class DownloadNotWritable(DownloadError, NotWritable):
    """The models directory may not be written."""


class WrongHash(DownloadError):
    """A file is not what the hub declares."""


class Cancelled(DownloadError):
    """The download was stopped on request."""


class Broken(Exception):
    """One attempt failed and another may succeed; `wait` is how many seconds the server asks to wait."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        self.wait = wait
        super().__init__(reason)


class Stop:
    """Ends transfers from another thread, including those that wait for bytes."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._callbacks: list[Callable[[], object]] = []

    def set(self) -> None:
        self._event.set()
        for callback in tuple(self._callbacks):
            callback()

    def check(self) -> None:
        """Raise Cancelled if the transfer was stopped."""
        if self._event.is_set():
            raise Cancelled("the download was cancelled", "start it again and it resumes where it stopped")

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
        self.check()

    @contextlib.contextmanager
    def calling(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call `callback` if the transfer is stopped inside the block."""
        self._callbacks.append(callback)
        try:
            self.check()
            yield
        finally:
            self._callbacks.remove(callback)


class HubClient:
    """GET requests to one hub and to the hosts that store its files."""

    def __init__(
        self, url: str, token: str | None, timeout: float = 60.0, trusted_hosts: Sequence[str] = (), tries: int = 5,
        delay: float = 1.0,
    ) -> None:  # fmt: skip
        self.url = url.rstrip("/")
        self.hub = _parse(self.url)
        self.is_local = is_loopback(self.hub.host)
        self.timeout = timeout
        self.trusted_hosts = tuple(trusted_hosts)
        self.tries = tries
        self.delay = delay
        self._token = token if self.hub.scheme == "https" or self.is_local else None  # never in clear text

    @contextlib.contextmanager
    def open(self, url: str, headers: Mapping[str, str], stop: Stop) -> "Iterator[httpx2.Response]":
        """Yield the response, after redirects that are allowed; its body is not read yet, and not compressed.

        Raise Broken if the hub asks to try again later, or if the connection breaks, also inside the block.
        """
        import httpx2

        sockets: list[socket.socket] = []
        try:
            with (
                stop.calling(lambda: _shut_down(sockets)),
                contextlib.closing(self._follow(_parse(url), headers, stop, sockets)) as response,
            ):
                status, encoding = response.status_code, response.headers.get("Content-Encoding", "identity")
                if status in _RETRY_STATUS:
                    wait = response.headers.get("Retry-After", "")
                    raise Broken(f"the hub answers {status}", float(wait) if re.fullmatch(r"\d{1,6}", wait) else None)
                if status in (200, 206) and encoding.lower() != "identity":
                    raise DownloadError(f"{url.rpartition('/')[2]} was sent compressed, which was not requested")
                yield response
            stop.check()
        except httpx2.InvalidURL:  # a redirect, which httpx2 parses too
            raise DownloadError("the hub gives an address that is not a URL") from None
        except (Broken, httpx2.TransportError) as error:
            stop.check()
            raise error if isinstance(error, Broken) else _explain(error) from None

    def _follow(
        self, url: "httpx2.URL", headers: Mapping[str, str], stop: Stop, sockets: list[socket.socket]
    ) -> "httpx2.Response":
        """Return the first response that is not a redirect; httpx2 itself would read the whole body of a redirect."""
        for _ in range(MAX_REDIRECTS + 1):
            stop.check()
            sent = {"Accept-Encoding": "identity", "User-Agent": "sala", **headers}
            if self._token and (url.scheme, url.netloc) == (self.hub.scheme, self.hub.netloc):
                sent["Authorization"] = f"Bearer {self._token}"
            request = self._http.build_request("GET", url, headers=sent)
            request.extensions["trace"] = self._trace(url.host, stop, sockets)
            response = self._http.send(request, stream=True)
            if not response.has_redirect_location:
                return response
            response.close()
            url = self.check_target(response.headers["Location"], url)
        raise DownloadError(f"{self.hub.host} redirects in a loop")

    def pause(self, error: Broken, stop: Stop, failures: int = 1) -> None:
        """Wait before the next attempt: as long as the hub asks, or longer after every failure."""
        wait = self.delay * 2 ** (failures - 1) if error.wait is None else error.wait
        stop.wait(min(MAX_WAIT_SECONDS, wait))

    def check_target(self, location: str, base: "httpx2.URL | None" = None) -> "httpx2.URL":
        """Return where a redirect leads. Raise DownloadError for another host, off HTTPS, or the local network."""
        target = _parse(location, base)
        host, shown = target.host, target.host[:100] or "nowhere"
        is_hub = (host, target.port) == (self.hub.host, self.hub.port)
        may_be_plain = (self.is_local and is_loopback(host)) or (is_hub and self.hub.scheme == "http")
        if target.scheme != "https" and not (target.scheme == "http" and may_be_plain):
            raise DownloadError(f"the hub redirects to {target.scheme}: at {shown}, which is refused")
        domains = (self.hub.host, *STORAGE_DOMAINS, *self.trusted_hosts)
        is_storage = any(host == domain or host.endswith("." + domain) for domain in domains)
        if not (is_loopback(host) if self.is_local else is_storage):
            message = f"the hub redirects to {shown}, which is not one of its own hosts"
            raise DownloadError(message, "if you trust that host, name it with --hub-hosts or SALA_HUB_HOSTS")
        if not is_hub and not self.is_local and host not in self.trusted_hosts:
            with contextlib.suppress(ValueError):
                check_address(str(ipaddress.ip_address(host)))
        return target

    @cached_property
    def _http(self) -> "httpx2.Client":
        import httpx2

        # No connection is kept open: a socket then belongs to one transfer, which may shut it down.
        return httpx2.Client(
            trust_env=not self.is_local,
            timeout=httpx2.Timeout(self.timeout, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_keepalive_connections=0),
        )

    def _trace(self, target: str, stop: Stop, sockets: list[socket.socket]) -> Callable[[str, Mapping[str, Any]], None]:
        """Return a function that sees every connection before anything is sent, and notes its socket."""
        is_known = self.is_local or target == self.hub.host or target in self.trusted_hosts
        host = ""

        def trace(event: str, info: Mapping[str, Any]) -> None:
            nonlocal host
            if event.endswith("connect_tcp.started"):
                host = info["host"]  # the proxy's, where there is one
            elif event.endswith(("connect_tcp.complete", "start_tls.complete")):
                stream = info["return_value"]
                sockets.append(stream.get_extra_info("socket"))
                try:
                    # The address that the socket really has: a name may resolve differently every time.
                    if not is_known and host == target:
                        check_address(sockets[-1].getpeername()[0])
                    stop.check()
                except DownloadError:
                    stream.close()
                    raise

        return trace


def _shut_down(sockets: Sequence[socket.socket]) -> None:
    for connected in sockets:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # of the plain socket: no TLS goodbye first


def _explain(error: "httpx2.TransportError") -> Exception:
    import httpx2

    host = error.request.url.host[:100]
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        remedy = "set SSL_CERT_FILE to your network's certificates"
        return DownloadError(f"the certificate of {host} is not trusted here", remedy)
    if isinstance(error, httpx2.ReadTimeout):
        return Broken("the hub has stopped sending data")
    if isinstance(error, httpx2.TimeoutException):
        return Broken(f"{host} does not answer")
    if isinstance(error, httpx2.ConnectError | httpx2.ProxyError):
        return Broken(f"{host} cannot be reached ({type(error).__name__})")
    return Broken("the connection was lost")


def _parse(url: str, base: "httpx2.URL | None" = None) -> "httpx2.URL":
    """Return a URL, which may be relative to `base`; raise DownloadError for one that the hub should not give."""
    import httpx2

    try:
        parsed = httpx2.URL(url) if base is None else base.join(url)
    except httpx2.InvalidURL:
        raise DownloadError("the hub gives an address that is not a URL") from None
    if len(url) > MAX_URL or parsed.userinfo or parsed.port == 0:
        raise DownloadError("the hub gives an address that is too long, or has a user name or an impossible port")
    return parsed


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str) -> None:
    """Raise DownloadError for an address that is not on the public internet: this machine, its network, a cloud's."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    if found.version == 4 and found in NAME_ROUTED:
        return
    if not found.is_global or found.is_multicast:
        raise DownloadError(f"the hub redirects to {found}, which is not on the public internet")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository as the hub declares it; it has at least one of the two hashes."""

    name: str
    url: str
    size: int
    sha256: str | None
    git_sha1: str | None  # of the blob as git counts it


def fetch(client: HubClient, file: RemoteFile, part: Path, stop: Stop, report: Callable[[int], None]) -> None:
    """Download the rest of a file into `part`; reconnect while it makes progress."""
    failures, best = 0, size_of(part)
    if not file.size:
        part.touch()
    while (size := size_of(part)) != file.size:
        if size > file.size:
            part.unlink()
            size = 0
        try:
            with client.open(file.url, {"Range": f"bytes={size}-"} if size else {}, stop) as response:
                _save(response, file, part, _start(response, file, part, size), stop, report)
        except Broken as error:
            failures = 1 if size_of(part) >= best + PROGRESS_BYTES else failures + 1
            best = max(best, size_of(part))
            if failures >= client.tries:
                remedy = "try again later; what has been downloaded is kept"
                raise DownloadError(f"{file.name} could not be downloaded: {error}", remedy) from None
            client.pause(error, stop, failures)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _save(
    response: "httpx2.Response", file: RemoteFile, part: Path, start: int, stop: Stop, report: Callable[[int], None]
) -> None:
    with writing_model(part, file.size - start), part.open("ab" if start else "wb") as handle:
        for chunk in response.iter_raw():
            stop.check()
            start += len(chunk)
            if start > file.size:
                handle.truncate(0)
                raise DownloadError(f"{file.name} is longer than the hub declares")
            handle.write(chunk)
            report(start)
    if start != file.size:
        raise Broken("the connection was lost")


def _start(response: "httpx2.Response", file: RemoteFile, part: Path, size: int) -> int:
    """Return the offset of the body that follows; raise Broken or DownloadError if it cannot be used."""
    status = response.status_code
    if status in (401, 403):
        message = f"{file.name} is restricted to users who accepted the model's terms"
        raise DownloadError(message, "accept them on the hub's page of the model, then set HF_TOKEN")
    if status not in (200, 206, 416) or (status != 200 and not size):
        raise DownloadError(f"{file.name} cannot be downloaded: the hub answers {status}")
    if status == 200:
        length = response.headers.get("Content-Length", "")
        if re.fullmatch(r"\d{1,18}", length) and int(length) != file.size:
            raise DownloadError(f"{file.name} has {int(length):,} bytes; the hub declares {file.size:,}")
        return 0
    found = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", response.headers.get("Content-Range", ""))
    if status == 416 or found is None or int(found[1]) != size or found[2] not in ("*", str(file.size)):
        part.unlink()
        raise Broken("the hub does not have the rest of the file", 0)
    return size


def verify(path: Path, file: RemoteFile, stop: Stop) -> str:
    """Return the sha256 of a file that has the declared size and hash; move any other aside and raise."""
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            stop.check()
            sha256.update(chunk)
            if file.sha256 is None:
                git.update(chunk)
        os.fsync(handle.fileno())
    is_right = git.hexdigest() == file.git_sha1 if file.sha256 is None else sha256.hexdigest() == file.sha256
    if size_of(path) != file.size or not is_right:
        path.replace(path.with_name(f"{file.name}.bad"))
        raise WrongHash(f"{file.name} does not have the hash that the hub declares", "download it again")
    return sha256.hexdigest()


@contextlib.contextmanager
def writing_model(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn errors of the file system inside the block into DownloadError."""
    try:
        with writing(path, needed):
            yield
    except DiskFull as error:
        remedy = "free some space, or set SALA_MODELS_DIR to a larger disk; what has been downloaded is kept"
        raise DownloadDiskFull(error.message, remedy) from None
    except NotWritable as error:
        raise DownloadNotWritable(error.message, "change its permissions, or set SALA_MODELS_DIR") from None
    except OSError as error:
        raise DownloadError(f"{path} cannot be written: {error.strerror}", "set SALA_MODELS_DIR") from None


def read_answer(client: HubClient, url: str, max_bytes: int, stop: Stop) -> "tuple[int, httpx2.Headers, bytes]":
    """Return status, headers and body of a small response; a broken one is asked for once more."""
    for is_last in (False, True):
        try:
            with client.open(url, {"Accept": "application/json"}, stop) as response:
                body = bytearray()
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > max_bytes:
                        raise DownloadError(f"{client.hub.host} sends more than {max_bytes >> 20} MiB of metadata")
                return response.status_code, response.headers, bytes(body)
        except Broken as error:
            if is_last:
                raise DownloadError(f"no list of files: {error}", "check that this machine is online") from None
            client.pause(error, stop)
    raise AssertionError
