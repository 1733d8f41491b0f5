"""Serves the files of the page and of the API's description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.responses import Response

_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"  # against clickjacking
)
_PAGE_HEADERS = {"Content-Security-Policy": _PAGE_POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
}


def page_handler(file: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    """Return the handler of one file."""
    content = (files("neuralmean.service") / "page" / file).read_bytes()

    async def page() -> Response:
        return Response(content, media_type=media_type, headers=_PAGE_HEADERS)

    return page
