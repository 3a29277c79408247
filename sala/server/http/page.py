"""Serve the chat page: static files from a fixed list, with a policy that lets them load nothing from other hosts."""

import functools
import hashlib
from importlib import resources

from fastapi import APIRouter, HTTPException, Request, Response

router = APIRouter()

PAGE = "index.html"
JAVASCRIPT = "text/javascript; charset=utf-8"
CONTENT_TYPES = {
    PAGE: "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "favicon.svg": "image/svg+xml",
    "answer.js": JAVASCRIPT,
    "api.js": JAVASCRIPT,
    "app.js": JAVASCRIPT,
    "composer.js": JAVASCRIPT,
    "dom.js": JAVASCRIPT,
    "files.js": JAVASCRIPT,
    "format.js": JAVASCRIPT,
    "highlight.js": JAVASCRIPT,
    "markdown.js": JAVASCRIPT,
    "settings.js": JAVASCRIPT,
    "sidebar.js": JAVASCRIPT,
    "store.js": JAVASCRIPT,
    "theme.js": JAVASCRIPT,
    "view.js": JAVASCRIPT,
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


@router.api_route("/web/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def get_file(request: Request, name: str) -> Response:
    if name not in CONTENT_TYPES or name == PAGE:
        raise HTTPException(404)
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    """Return the whole file, or 304. Ranges are ignored, as HTTP permits: the files are small."""
    body, tag = _read(name)
    headers = {**HEADERS, "ETag": tag}
    if tag in (known.strip().removeprefix("W/") for known in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=CONTENT_TYPES[name])


@functools.cache
def _read(name: str) -> tuple[bytes, str]:
    """Return the contents and the ETag of a file; read it once."""
    body = resources.files("sala.server").joinpath("web", name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'
