"""A hub on loopback that speaks the real one's protocol, and misbehaves on demand."""

import gzip
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret-of-the-test"


@dataclass
class Seen:
    path: str
    headers: dict[str, str]


@dataclass
class FakeHub:
    """`faults` maps a file's name to how it is served wrongly; each is used up by the number given with it."""

    files: dict[str, bytes]
    repo_id: str = "org/model"
    commit: str = COMMIT
    lies: dict[str, dict[str, Any]] = field(default_factory=dict)  # what the listing says otherwise
    faults: dict[str, tuple[str, int]] = field(default_factory=dict)
    status: int = 200  # of the listing
    error_code: str = ""
    redirect: str | None = None  # where weights lie
    etag: str = '"one"'
    pause: float = 0.0  # before every 64 KiB
    seen: list[Seen] = field(default_factory=list)
    url: str = ""

    def listing(self) -> dict[str, Any]:
        return {"id": self.repo_id, "sha": self.commit, "siblings": [self._sibling(name) for name in self.files]}

    def _sibling(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
        entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        if name.endswith((".safetensors", ".bin")):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return {**entry, **self.lies.get(name, {})}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": one["blobId"]}
            for one in self.listing()["siblings"]
        ]

    def requests_of(self, name: str) -> list[Seen]:
        return [request for request in self.seen if request.path.endswith("/" + name)]

    def take_fault(self, name: str) -> str | None:
        kind, left = self.faults.get(name, ("", 0))
        if left <= 0:
            return None
        self.faults[name] = (kind, left - 1)
        return kind


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        self.close_connection = True
        path = unquote(urlsplit(self.path).path)
        self.hub.seen.append(Seen(self.path, {key.lower(): value for key, value in self.headers.items()}))
        if path.startswith("/api/v1/models/"):
            self._answer_modelscope(path)
        elif path.startswith(f"/api/models/{self.hub.repo_id}/tree/{self.hub.commit}"):
            self._send(200, json.dumps(self.hub.tree()).encode())
        elif path.startswith("/api/models/"):
            self._answer_listing(urlsplit(self.path).path)  # the whole URL, if we are asked as a proxy
        elif path.startswith((f"/{self.hub.repo_id}/resolve/{self.hub.commit}/", "/cdn/", "/models/")):
            self._answer_file(path.rpartition("/")[2], is_cdn=path.startswith("/cdn/"))
        else:
            self._send(404, b"{}")

    def do_CONNECT(self) -> None:
        """What a client asks a proxy before it speaks TLS with another host: noted and refused."""
        self.close_connection = True
        self.hub.seen.append(Seen(self.path, {}))
        self._send(502, b"")

    def do_HEAD(self) -> None:
        """What Hugging Face's own client asks about a file before it downloads it."""
        self.close_connection = True
        name = unquote(urlsplit(self.path).path).rpartition("/")[2]
        self.send_response(200)
        etag = f'"{hashlib.sha256(self.hub.files[name]).hexdigest()}"'
        more = {"ETag": etag, "X-Repo-Commit": self.hub.commit, "Content-Length": str(len(self.hub.files[name]))}
        for key, value in {**more, "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content_Length": str(len(body)), "Connection": "close", **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self._write(body)

    def _write(self, body: bytes) -> None:
        for at in range(0, len(body), 1 << 16):
            time.sleep(self.hub.pause)
            self.wfile.write(body[at : at + (1 << 16)])

    def _answer_listing(self, path: str) -> None:
        hub = self.hub
        if not path.startswith(f"/api/models/{hub.repo_id}/revision/"):
            self._send(404, b"{}", X_Error_Code="RepoNotFound")
        elif hub.status != 200:
            self._send(hub.status, b'{"error": "no"}', X_Error_Code=hub.error_code)
        else:
            self._send(200, json.dumps(hub.listing()).encode())

    def _answer_modelscope(self, path: str) -> None:
        assert path == f"/api/v1/models/{self.hub.repo_id}/repo/files"
        files = [
            {"Path": name, "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest(), "Type": "blob"}
            for name, data in self.hub.files.items()
        ]
        files.append({"Path": "folder", "Size": 0, "Type": "tree"})
        self._send(200, json.dumps({"Code": 200, "Data": {"Files": files}, "Success": True}).encode())

    def _answer_file(self, name: str, is_cdn: bool) -> None:
        hub, data = self.hub, self.hub.files.get(name)
        if data is None:
            self._send(404, b"")
            return
        if hub.redirect is not None and not is_cdn and name.endswith(".safetensors"):
            self._send(302, b"", Location=hub.redirect.format(name=name))
            return
        fault = hub.take_fault(name)
        if fault is not None:
            getattr(self, "_" + fault)(data)
            return
        start = self._start(len(data))
        if start is None:
            self._send(200, data, ETag=hub.etag)
        else:
            self._part(data, start)

    def _part(self, data: bytes, start: int) -> None:
        self._send(206, data[start:], ETag=self.hub.etag, Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")

    def _start(self, size: int) -> int | None:
        wanted = self.headers.get("Range")
        if wanted is None or self.headers.get("If-Range", self.hub.etag) != self.hub.etag:
            return None
        return int(wanted.removeprefix("bytes=").removesuffix("-"))

    # the faults

    def _cut(self, data: bytes) -> None:
        start = self._start(len(data)) or 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", self.hub.etag)
        self.end_headers()
        self.wfile.write(data[start : (start + len(data)) // 2])

    def _ignore_range(self, data: bytes) -> None:
        self._send(200, data, ETag=self.hub.etag)

    def _other_etag(self, data: bytes) -> None:
        """A part of what is now another file, against the rules of If-Range."""
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.hub.etag = '"two"'
        self._part(data, start)

    def _other_start(self, data: bytes) -> None:
        self._part(data, 0)

    def _unsatisfiable(self, data: bytes) -> None:
        self._send(416, b"", Content_Range=f"bytes */{len(data)}")

    def _busy(self, data: bytes) -> None:
        self._send(503, b"", Retry_After="0")

    def _gated(self, data: bytes) -> None:
        self._send(403, b"", X_Error_Code="GatedRepo")

    def _missing(self, data: bytes) -> None:
        self._send(404, b"")

    def _stall(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:100])
        self.wfile.flush()
        time.sleep(3)

    def _endless(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for _ in range(1 << 16):
                self.wfile.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        except OSError:
            return

    def _bomb(self, data: bytes) -> None:
        self._send(200, gzip.compress(bytes(50 << 20)), Content_Encoding="gzip")

    def _longer(self, data: bytes) -> None:
        self._send(200, data + b"and more")

    def _wrong(self, data: bytes) -> None:
        self._send(200, bytes(byte ^ 1 for byte in data), ETag=self.hub.etag)

    def log_message(self, *_: object) -> None:
        """Silence."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients that go away are part of the game."""


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def tree(directory: Path) -> dict[str, str]:
    """Everything below a directory: what it is, and the hash of what is in it."""
    out = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            out[name] = f"-> {path.readlink()}"
        elif path.is_dir():
            out[name] = "directory"
        else:
            out[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return out
