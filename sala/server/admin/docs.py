"""The reference of the HTTP API, as a page that loads nothing from other hosts.

The page itself is public. It shows `/openapi.json`, which needs the key.
"""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse

from sala.server.http.security import need_key

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "reference"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


@router.get("/docs")
async def show_page() -> FileResponse:
    return FileResponse(FOLDER / "page.html", headers=HEADERS, media_type="text/html")


@router.get("/docs/page.js")
async def send_script() -> FileResponse:
    return FileResponse(FOLDER / "page.js", headers=HEADERS, media_type="text/javascript")


@router.get("/docs/page.css")
async def send_style() -> FileResponse:
    return FileResponse(FOLDER / "page.css", headers=HEADERS, media_type="text/css")


@router.get("/openapi.json", dependencies=[Depends(need_key)])
async def send_schema(request: Request) -> JSONResponse:
    return JSONResponse(describe_api(request.app))


def describe_api(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document without the 422 responses that FastAPI adds: invalid requests get 400 here."""
    document = app.openapi()
    for operation in (each for path in document["paths"].values() for each in path.values()):
        operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document
