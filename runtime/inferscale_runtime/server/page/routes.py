"""Routes of the web page.

The files hold no data and need no credentials: the page asks its reader for a key and calls the
memory API and the chat route like any other client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

PATH = "/inferscale/ui"
FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/client.js": ("client.js", "text/javascript; charset=utf-8"),
    "/dom.js": ("dom.js", "text/javascript; charset=utf-8"),
    "/facts.js": ("facts.js", "text/javascript; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
}
"""Path below ``PATH`` -> file and media type."""
HEADERS = {
    # Nothing from elsewhere, nothing inline, no frame around it: a text of somebody's memory that
    # got into the page as markup could still load, send and run nothing.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # Looked at again each time: a new release must not run beside an old file.
    "Cache-Control": "no-cache",
}


def attach_page(app: FastAPI) -> None:
    """Adds the routes; the files are read once."""
    folder = Path(__file__).parent / "static"
    for path, (name, kind) in FILES.items():
        app.get(PATH + path, include_in_schema=False)(_answer((folder / name).read_bytes(), kind))


def _answer(body: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(body, media_type=kind, headers=HEADERS)

    return answer
