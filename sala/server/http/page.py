"""Serve the chat page and the reference of the API: static files from a fixed list.

A policy lets them load nothing from other hosts. Both pages are public; the reference shows `/openapi.json`, which
needs the key.
"""

import functools
import hashlib
import json
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from sala.server.http.security import need_key

router = APIRouter(include_in_schema=False)

PAGE = "index.html"
OWN = (
    PAGE, "style.css", "favicon.svg", "answer.js", "api.js", "app.js", "branches.js", "composer.js",
    "documents.js", "dom.js", "exchange.js", "files.js", "format.js", "frame.js", "library.js", "markdown.js",
    "menu.js", "reader.js", "settings.js", "sidebar.js", "sources.js", "store.js", "theme.js", "tools.js",
    "view.js",
)  # fmt: skip
PAGES = {
    "/": ("web", PAGE),
    "/docs": ("reference", "page.html"),
    "/docs/page.js": ("reference", "page.js"),
    "/docs/page.css": ("reference", "page.css"),
}
MANIFEST = "vendor/vendored.json"  # third-party files, with their versions and hashes
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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


@router.api_route("/", methods=["GET", "HEAD"])
@router.get("/docs")
@router.get("/docs/page.js")
@router.get("/docs/page.css")
async def get_page(request: Request) -> Response:
    return _answer(request, *PAGES[request.scope["path"]])


@router.api_route("/web/{name:path}", methods=["GET", "HEAD"])
async def get_file(request: Request, name: str) -> Response:
    if name not in content_types() or name == PAGE:
        raise HTTPException(404)
    return _answer(request, "web", name)


@router.get("/openapi.json", dependencies=[Depends(need_key)])
async def get_schema(request: Request) -> JSONResponse:
    return JSONResponse(describe_api(request.app))


def describe_api(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the schemas of all answers, which are not built from models.

    It has none of the 422 responses that FastAPI adds: invalid requests get 400 here.
    """
    document = app.openapi()
    schemas = document["components"]["schemas"]
    schemas |= {name: {"title": name, **one} for name, one in json.loads(_read("reference", "schemas.json")[0]).items()}
    for operation in (each for path in document["paths"].values() for each in path.values()):
        operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


@functools.cache
def content_types() -> dict[str, str]:
    """Return the content types of the chat page's files: our own, and the vendored ones that browsers load."""
    vendored = [f"vendor/{name}" for name in json.loads(_read("web", MANIFEST)[0])]
    types = {name: CONTENT_TYPES.get(PurePosixPath(name).suffix) for name in (*OWN, *vendored)}
    return {name: kind for name, kind in types.items() if kind is not None}


def _answer(request: Request, folder: str, name: str) -> Response:
    """Return the whole file, or 304. Ranges are ignored, as HTTP permits: the files are small."""
    body, tag = _read(folder, name)
    headers = {**HEADERS, "ETag": tag}
    if tag in (known.strip().removeprefix("W/") for known in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=CONTENT_TYPES[PurePosixPath(name).suffix])


@functools.cache
def _read(folder: str, name: str) -> tuple[bytes, str]:
    """Return the contents and the ETag of a file; read it once."""
    body = resources.files("sala.server").joinpath(folder, name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'
