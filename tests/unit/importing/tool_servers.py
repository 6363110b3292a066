"""Small servers that speak the documented calls of Mem0, Zep and Letta; see docs/sources.md.

Each keeps its data in plain lists that tests change, answers in small pages, and can be told to
misbehave first: refuse, slow down, break, or cut an answer in the middle.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Misbehaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]

TOKEN = "t0psecret-token"


def status(code: int, **headers: str) -> Misbehaviour:
    """An answer with this status."""

    async def answer(_: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=code, headers=named, text="private words of the server")

    return answer


async def cut(request: web.Request) -> web.StreamResponse:
    """An answer that ends in the middle."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"items": [')
    assert request.transport is not None
    request.transport.close()
    return response


async def not_json(_: web.Request) -> web.StreamResponse:
    """A web page."""
    return web.Response(text="<html>private words</html>", content_type="text/html")


class ToolServer:
    """One server in a thread of its own.

    Attributes:
        requests: ``METHOD path?query`` of every request.
        misbehave: Taken first, one a request.
        page: Most items of one page.
    """

    header, scheme = "Authorization", ""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.misbehave: list[Misbehaviour] = []
        self.page = 2
        self.url = ""

    def routes(self) -> list[web.RouteDef]:
        """The documented calls."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def start() -> None:
            app = web.Application(middlewares=[self._middleware])
            app.add_routes(self.routes())
            self._runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
            ready.set()

        def run() -> None:
            self._loop.run_until_complete(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @property
    def _middleware(self) -> Any:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.requests.append(f"{request.method} {request.path_qs}")
            if self.misbehave:
                return await self.misbehave.pop(0)(request)
            if request.headers.get(self.header) != f"{self.scheme}{TOKEN}":
                return web.json_response({"message": "no"}, status=401)
            return await handler(request)

        return middleware

    def size(self, request: web.Request, name: str) -> int:
        """Items of a page: what is asked for, but never more than ``page``."""
        return min(self.page, int(request.query.get(name, self.page)))


class ZepServer(ToolServer):
    """Zep, API version 4.

    Attributes:
        users: ``{"uuid", "user_id"}``.
        edges: By user UUID.
        episodes: By user UUID.
    """

    scheme = "Api-Key "

    def __init__(self) -> None:
        super().__init__()
        self.users: list[dict[str, Any]] = []
        self.edges: dict[str, list[dict[str, Any]]] = {}
        self.episodes: dict[str, list[dict[str, Any]]] = {}

    def routes(self) -> list[web.RouteDef]:
        """List users, edges and episodes."""

        async def users(request: web.Request) -> web.Response:
            return self._page(request, self.users)

        def items(data: dict[str, list[dict[str, Any]]]) -> Handler:
            async def answer(request: web.Request) -> web.Response:
                uuid = request.match_info["uuid"]
                if uuid not in data:
                    return web.json_response({"message": "not found"}, status=404)
                return self._page(request, data[uuid])

            return answer

        return [
            web.post("/api/v4/users/list", users),
            web.post("/api/v4/graphs/{uuid}/edges/list", items(self.edges)),
            web.post("/api/v4/graphs/{uuid}/episodes/list", items(self.episodes)),
        ]

    def _page(self, request: web.Request, items: list[dict[str, Any]]) -> web.Response:
        ordered = sorted(items, key=lambda item: str(item["uuid"]))
        start = int(request.query.get("cursor", "0"))
        end = start + self.size(request, "page_size")
        body: dict[str, Any] = {"items": ordered[start:end], "total_size": len(items)}
        if end < len(items):
            body["next_cursor"] = str(end)
        return web.json_response(body)


class LettaServer(ToolServer):
    """Letta, API version 1.

    Attributes:
        agents: As listed.
        blocks: By agent id.
        passages: By agent id.
    """

    scheme = "Bearer "

    def __init__(self) -> None:
        super().__init__()
        self.agents: list[dict[str, Any]] = []
        self.blocks: dict[str, list[dict[str, Any]]] = {}
        self.passages: dict[str, list[dict[str, Any]]] = {}

    def routes(self) -> list[web.RouteDef]:
        """List agents, blocks and passages."""

        async def agents(request: web.Request) -> web.Response:
            kept = {
                "id",
                *(name.removeprefix("agent.") for name in request.query.getall("include")),
            }
            listed = [{k: v for k, v in agent.items() if k in kept} for agent in self.agents]
            return self._page(request, listed)

        async def blocks(request: web.Request) -> web.Response:
            return self._page(request, self.blocks.get(request.match_info["agent"], []))

        async def passages(request: web.Request) -> web.Response:
            return self._page(request, self.passages.get(request.match_info["agent"], []))

        return [
            web.get("/v1/agents/", agents),
            web.get("/v1/agents/{agent}/core-memory/blocks", blocks),
            web.get("/v1/agents/{agent}/archival-memory", passages),
        ]

    def _page(self, request: web.Request, items: list[dict[str, Any]]) -> web.Response:
        after = request.query.get("after")
        start = 0
        if after is not None:
            places = [n for n, item in enumerate(items) if item["id"] == after]
            if not places:
                return web.json_response({"detail": "no such cursor"}, status=404)
            start = places[0] + 1
        return web.json_response(items[start : start + self.size(request, "limit")])


class Mem0Server(ToolServer):
    """The server of the open-source library, 2.0.18.

    Attributes:
        memories: As the server lists them.
    """

    header = "X-API-Key"

    def __init__(self) -> None:
        super().__init__()
        self.page = 1000
        self.memories: list[dict[str, Any]] = []

    def routes(self) -> list[web.RouteDef]:
        """List entities and memories."""

        async def entities(_: web.Request) -> web.Response:
            found: dict[tuple[str, str], dict[str, Any]] = {}
            for memory in self.memories:
                for kind in ("user", "agent", "run"):
                    name = memory.get(f"{kind}_id")
                    if name:
                        empty = {"id": name, "type": kind, "total_memories": 0, "updated_at": ""}
                        entry = found.setdefault((kind, name), empty)
                        entry["total_memories"] += 1
                        changed = memory.get("updated_at") or memory["created_at"]
                        entry["updated_at"] = max(entry["updated_at"], changed)
            return web.json_response(list(found.values()))

        async def memories(request: web.Request) -> web.Response:
            user = request.query["user_id"]
            mine = [memory for memory in self.memories if memory.get("user_id") == user]
            return web.json_response({"results": mine[: self.size(request, "top_k")]})

        return [web.get("/entities", entities), web.get("/memories", memories)]


class Mem0Platform(ToolServer):
    """The hosted platform: entities v1, memories v3, history v1.

    Attributes:
        memories: As the platform lists them.
        history: By memory id.
    """

    scheme = "Token "

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[dict[str, Any]] = []
        self.history: dict[str, list[dict[str, Any]]] = {}

    def routes(self) -> list[web.RouteDef]:
        """List entities, memories and the history of one."""

        async def entities(request: web.Request) -> web.Response:
            names = sorted({memory["user_id"] for memory in self.memories})
            listed = [{"id": f"e{n}", "name": n, "type": "user"} for n in names]
            return self._page(request, listed, self.page)

        async def memories(request: web.Request) -> web.Response:
            user = json.loads(await request.text())["filters"]["user_id"]
            mine = [memory for memory in self.memories if memory["user_id"] == user]
            return self._page(request, mine, self.size(request, "page_size"))

        async def history(request: web.Request) -> web.Response:
            return web.json_response(self.history.get(request.match_info["id"], []))

        return [
            web.get("/v1/entities/", entities),
            web.post("/v3/memories/", memories),
            web.get("/v1/memories/{id}/history/", history),
        ]

    def _page(self, request: web.Request, items: list[dict[str, Any]], size: int) -> web.Response:
        number = int(request.query.get("page", "1"))
        more = number * size < len(items)
        # Behind a proxy the address of the next page is not the one that was asked.
        following = f"http://inside.example{request.path}?page={number + 1}" if more else None
        page = items[(number - 1) * size : number * size]
        return web.json_response({"count": len(items), "next": following, "results": page})
