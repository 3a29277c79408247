"""The chat page: static files of the package, served from a fixed list, allowed to load nothing from elsewhere."""

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
    "Cache-Control": "no-cache",  # kept, but asked for anew: after an update the modules must fit each other
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
    """The whole file, or 304. Ranges are ignored, which HTTP allows: the files are small."""
    body, tag = _read(name)
    headers = {**HEADERS, "ETag": tag}
    if tag in (known.strip().removeprefix("W/") for known in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=CONTENT_TYPES[name])


@functools.cache
def _read(name: str) -> tuple[bytes, str]:
    """A file of the page and its tag; read once."""
    body = resources.files("sala.server").joinpath("web", name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'
