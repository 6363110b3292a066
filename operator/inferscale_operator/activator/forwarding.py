"""Passing one request on to a server, and its answer back as it comes."""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

CONNECT_SECONDS = 5.0
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers about one connection (RFC 9110, 7.6.1)."""
_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class NotReachedError(Exception):
    """The server ended the connection before it answered: another may be asked."""


class BrokenAnswerError(Exception):
    """The answer ended too early, and its beginning has been passed on."""


def passed_on(headers: Iterable[tuple[str, str]], *leave_out: str) -> CIMultiDict[str]:
    """Headers without those that are about the connection."""
    pairs = list(headers)
    named = {
        word.strip().lower()
        for name, value in pairs
        if name.lower() == "connection"
        for word in value.split(",")
    }
    dropped = HOP_BY_HOP | named | set(leave_out)
    return CIMultiDict((name, value) for name, value in pairs if name.lower() not in dropped)


def new_session() -> aiohttp.ClientSession:
    """A session for forwarding: no limits but that of connecting, nothing decoded or added."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        connector=aiohttp.TCPConnector(limit=0),
        auto_decompress=False,
        skip_auto_headers=_AUTOMATIC,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def forward(
    session: aiohttp.ClientSession, request: web.Request, body: bytes, server: str
) -> web.StreamResponse:
    """Sends a request to a server and streams the answer back.

    Args:
        session: Of ``new_session``.
        request: The client's request, whose body has been read.
        body: That body.
        server: URL of the server without a path.

    Raises:
        NotReachedError: Before any of an answer came.
        BrokenAnswerError: Behind a part of it.
    """
    # aiohttp computes the length anew, and has answered "Expect" itself.
    headers = passed_on(request.headers.items(), "content-length", "expect")
    url = URL(f"{server}{request.rel_url.raw_path_qs}", encoded=True)
    try:
        answer = await session.request(
            request.method,
            url,
            headers=headers,
            data=body if body or request.can_read_body else None,
            allow_redirects=False,
        )
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise NotReachedError(type(error).__name__) from error
    async with answer:
        back = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=passed_on(answer.headers.items())
        )
        if hdrs.CONTENT_LENGTH not in answer.headers and request.version >= (1, 1):
            back.enable_chunked_encoding()
        # The next request should find the servers without this detour.
        back.force_close()
        await back.prepare(request)
        try:
            async for chunk in answer.content.iter_any():
                await back.write(chunk)
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, TimeoutError) as error:
            raise BrokenAnswerError(type(error).__name__) from error
        await back.write_eof()
        return back
