"""Serve the chat page: static files from a fixed list, with a policy that lets them load nothing from other hosts."""

import functools
import hashlib
import json
from importlib import resources
from pathlib import PurePosixPath

from fastapi import APIRouter, HTTPException, Request, Response

router = APIRouter()

PAGE = "index.html"
OWN = (
    PAGE, "style.css", "favicon.svg", "answer.js", "api.js", "app.js", "composer.js", "dom.js", "files.js", "format.js",
    "markdown.js", "settings.js", "sidebar.js", "store.js", "theme.js", "view.js",
)  # fmt: skip
MANIFEST = "vendor/vendored.json"  # third-party files, with their versions and hashes
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # cached but revalidated: after an update the modules must match each other
}


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def get_page(request: Request) -> Response:
    return _answer(request, PAGE)


@router.api_route("/web/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
async def get_file(request: Request, name: str) -> Response:
    if name not in content_types() or name == PAGE:
        raise HTTPException(404)
    return _answer(request, name)


@functools.cache
def content_types() -> dict[str, str]:
    """Return the content types of all files that are served: our own, and the vendored ones that browsers load."""
    vendored = [f"vendor/{name}" for name in json.loads(_read(MANIFEST)[0])]
    types = {name: CONTENT_TYPES.get(PurePosixPath(name).suffix) for name in (*OWN, *vendored)}
    return {name: kind for name, kind in types.items() if kind is not None}


def _answer(request: Request, name: str) -> Response:
    """Return the whole file, or 304. Ranges are ignored, as HTTP permits: the files are small."""
    body, tag = _read(name)
    headers = {**HEADERS, "ETag": tag}
    if tag in (known.strip().removeprefix("W/") for known in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=content_types()[name])


@functools.cache
def _read(name: str) -> tuple[bytes, str]:
    """Return the contents and the ETag of a file; read it once."""
    body = resources.files("sala.server").joinpath("web", name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'
