"""The routes of the memory API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Response
from fastapi.responses import JSONResponse, StreamingResponse

from inferscale_runtime.retrieval.search import top_k
from inferscale_runtime.server.memory_api import models
from inferscale_runtime.server.memory_api.call import (
    Call,
    CallOf,
    FactPath,
    IdempotencyKey,
    IfMatch,
    IfNoneMatch,
    etag,
    is_unchanged,
    versioned,
    wanted_version,
)
from inferscale_runtime.server.memory_api.idempotency import made_id
from inferscale_runtime.server.memory_api.operations import precondition_failed
from inferscale_runtime.server.memory_api.paths import UndecodedPaths, decode_id
from inferscale_runtime.server.memory_api.route import MemoryRoute
from inferscale_runtime.server.refusal import Refusal
from inferscale_runtime.server.users import UserView
from inferscale_runtime.store.living import FactWrite
from inferscale_runtime.store.records import UserMemory

router = APIRouter(prefix="/inferscale/v1/users/{user}", tags=["memory"], route_class=MemoryRoute)


def _fact(view: UserView, index: int) -> models.Fact:
    fact = view.memory.facts[index]
    return models.Fact(
        id=fact.id,
        text=fact.text,
        time=fact.time,
        turn_id=fact.turn_id,
        origin=fact.origin,
        created_at=fact.created_at,
        updated_at=fact.updated_at,
        injectable=fact.id in view.segments,
    )


def _position(view: UserView, fact: str) -> int:
    for index, item in enumerate(view.memory.facts):
        if item.id == fact:
            return index
    raise Refusal(HTTPStatus.NOT_FOUND, "field 'id': this user has no such fact", "id")


@router.get("/facts", response_model=models.FactList, responses=models.error_responses())
async def list_facts(
    call: CallOf,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most facts of the page.")] = 100,
    after: Annotated[
        str | None, Query(max_length=models.MAX_ID_BYTES, description="`next` of the page before.")
    ] = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Lists a user's facts in the order in which they were learnt."""
    view = await call.operations.view(call.store(), call.user)
    version = view.memory.version
    if is_unchanged(if_none_match, version):
        return Response(status_code=304, headers={"etag": etag(version)})
    total = len(view.memory.facts)
    start = 0 if after is None else _after(view, after)
    end = min(total, start + limit)
    facts = [_fact(view, n) for n in range(start, end)]
    call.count(facts=len(facts))
    following = facts[-1].id if end < total else None
    return versioned(models.FactList(facts=facts, next=following, version=version), version)


def _after(view: UserView, fact: str) -> int:
    try:
        return _position(view, fact) + 1
    except Refusal:
        raise Refusal(
            HTTPStatus.BAD_REQUEST,
            "field 'after': this fact is not there any more; begin with the first page",
            "after",
        ) from None


@router.put(
    "/facts", response_model=models.Written, responses=models.error_responses(409, 412, 422)
)
async def put_facts(
    call: CallOf,
    batch: models.FactBatch,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Writes facts, all or none: new ones are added, those whose id is known are changed."""
    version = wanted_version(if_match)
    _no_duplicates(batch)

    async def carry_out(scope: str) -> Response:
        writes = [
            FactWrite(fact.id or made_id(scope, n), fact.text, fact.time, fact.turn_id)
            for n, fact in enumerate(batch.facts)
        ]
        written = await _write(call, writes, version, "facts.")
        return versioned(written, written.version)

    return await call.once(idempotency_key, carry_out)


def _no_duplicates(batch: models.FactBatch) -> None:
    seen: set[str] = set()
    for n, fact in enumerate(batch.facts):
        if fact.id is not None and fact.id in seen:
            param = f"facts.{n}.id"
            message = f"field '{param}': an earlier fact of the batch has it; give each its own id"
            raise Refusal(HTTPStatus.BAD_REQUEST, message, param)
        seen.add(fact.id or "")


async def _write(
    call: Call, writes: list[FactWrite], version: int | None, where: str
) -> models.Written:
    opened = call.store()
    turns = [write.turn_id for write in writes]
    if any(turns):
        view = await call.operations.find(opened, call.user)
        known = {turn.id for turn in view.memory.turns} if view else set()
        for n, turn in enumerate(turns):
            if turn is not None and turn not in known:
                param = f"facts.{n}.turn_id" if where else "turn_id"
                message = f"field '{param}': this user has no such turn; leave it out"
                raise Refusal(HTTPStatus.BAD_REQUEST, message, param)
    done = await call.operations.put(opened, call.user, writes, version)
    written = models.Written(
        created=list(done.created),
        updated=list(done.updated),
        unchanged=list(done.unchanged),
        version=done.version,
    )
    call.count(created=len(written.created), updated=len(written.updated))
    return written


@router.delete(
    "/facts", response_model=models.Deleted, responses=models.error_responses(409, 412, 422)
)
async def delete_facts(
    call: CallOf,
    ids: Annotated[
        list[models.Id],
        Query(alias="id", min_length=1, max_length=models.MAX_BATCH, description="Ids of facts."),
    ],
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Forgets facts; ids that are not there are no error."""
    version = wanted_version(if_match)
    return await call.once(idempotency_key, lambda _: _forget(call, ids, version))


async def _forget(call: Call, ids: list[str], version: int | None) -> Response:
    opened = call.store()
    await call.operations.view(opened, call.user)
    done = await call.operations.delete(opened, call.user, list(dict.fromkeys(ids)), version)
    deleted = models.Deleted(
        deleted=list(done.deleted),
        missing=list(done.missing),
        invalidated=done.invalidated,
        version=done.version,
    )
    call.count(deleted=len(deleted.deleted))
    return versioned(deleted, deleted.version)


@router.get("/facts/{id}", response_model=models.Fact, responses=models.error_responses())
async def get_fact(call: CallOf, sent: FactPath, if_none_match: IfNoneMatch = None) -> Response:
    """Reads one fact; its ETag is that of the user's whole memory."""
    fact = decode_id(sent, "id")
    view = await call.operations.view(call.store(), call.user)
    found = _fact(view, _position(view, fact))
    version = view.memory.version
    if is_unchanged(if_none_match, version):
        return Response(status_code=304, headers={"etag": etag(version)})
    return versioned(found, version)


@router.put(
    "/facts/{id}",
    response_model=models.Written,
    responses={201: {"model": models.Written}, **models.error_responses(409, 412, 422)},
)
async def put_fact(
    call: CallOf,
    sent: FactPath,
    content: models.FactContent,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Writes one fact; 201 when it is new."""
    fact = decode_id(sent, "id")
    version = wanted_version(if_match)
    if if_none_match is not None and if_none_match.strip() != "*":
        raise Refusal(
            HTTPStatus.BAD_REQUEST, "header 'If-None-Match': it must be *", "If-None-Match"
        )

    async def carry_out(_: str) -> Response:
        condition = version
        if if_none_match is not None:
            condition = await _version_without(call, fact, version)
        write = FactWrite(fact, content.text, content.time, content.turn_id)
        written = await _write(call, [write], condition, "")
        return versioned(written, written.version, 201 if written.created else 200)

    return await call.once(idempotency_key, carry_out)


async def _version_without(call: Call, fact: str, version: int | None) -> int:
    """The version in which a fact is not there, so that nobody can put it there meanwhile."""
    view = await call.operations.find(call.store(), call.user)
    if view is None:
        return 0 if version is None else version
    if any(item.id == fact for item in view.memory.facts):
        raise Refusal(
            HTTPStatus.PRECONDITION_FAILED,
            "header 'If-None-Match': the fact is there already",
            "If-None-Match",
        )
    if version is not None and version != view.memory.version:
        raise precondition_failed()
    return view.memory.version


@router.delete(
    "/facts/{id}", response_model=models.Deleted, responses=models.error_responses(409, 412, 422)
)
async def delete_fact(
    call: CallOf,
    sent: FactPath,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Forgets one fact."""
    fact = decode_id(sent, "id")
    version = wanted_version(if_match)

    async def carry_out(_: str) -> Response:
        view = await call.operations.view(call.store(), call.user)
        _position(view, fact)
        return await _forget(call, [fact], version)

    return await call.once(idempotency_key, carry_out)


@router.post("/search", response_model=models.SearchResult, responses=models.error_responses())
async def search_facts(call: CallOf, search: models.Search) -> Response:
    """Finds the facts that are most like a text."""
    opened = call.store()
    view = await call.operations.view(opened, call.user)
    version = view.memory.version
    found: list[models.ScoredFact] = []
    if view.memory.facts:
        query = await call.operations.embed(opened, view, search.query)
        for n in top_k(query, view.memory.embeddings, search.k):
            score = float(view.memory.embeddings[n] @ query)
            found.append(models.ScoredFact(**_fact(view, n).model_dump(), score=score))
    call.count(facts=len(found))
    return versioned(models.SearchResult(facts=found, version=version), version)


@router.get(
    "/export",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}},
        **models.error_responses(),
    },
)
async def export_memory(call: CallOf) -> Response:
    """The user's turns and facts as input lines of `inferscale encode`."""
    view = await call.operations.view(call.store(), call.user)
    call.count(facts=len(view.memory.facts), turns=len(view.memory.turns))
    headers = {"etag": etag(view.memory.version)}
    lines = export_lines(view.memory)
    return StreamingResponse(lines, headers=headers, media_type="application/x-ndjson")


def export_lines(memory: UserMemory) -> Iterator[str]:
    """The lines of an export (pure)."""
    for turn in memory.turns:
        line: dict[str, Any] = {"kind": "turn", "user": memory.user, **asdict(turn)}
        yield _line(line)
    for fact in memory.facts:
        line = {"kind": "fact", "user": memory.user, "id": fact.id, "text": fact.text}
        yield _line({**line, "time": fact.time, "turn": fact.turn_id})


def _line(fields: dict[str, Any]) -> str:
    given = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(given, ensure_ascii=False) + "\n"


@router.get("/answers", response_model=models.AnswerList, responses=models.error_responses())
async def list_answers(call: CallOf) -> Response:
    """How memory was used in the last answers that this replica gave."""
    log = call.request.app.state.inferscale_answers
    records = log.of(call.store().entry.name, call.user)
    answers = [models.Answer(**asdict(record)) for record in records]
    return JSONResponse(models.AnswerList(answers=answers).model_dump())


@router.delete("", response_model=models.ErasureReceipt, responses=models.error_responses(409, 422))
async def erase_user(call: CallOf, idempotency_key: IdempotencyKey = None) -> Response:
    """Deletes all of a user, in memory and every file; of all writable stores if none is named."""

    async def carry_out(_: str) -> Response:
        receipt = models.ErasureReceipt(files=0, bytes=0, digests=[], arena_bytes=0)
        for opened in call.stores():
            call.request.app.state.inferscale_answers.forget(opened.entry.name, call.user)
            done, held = await call.operations.erase(opened, call.user)
            receipt.files += done.files
            receipt.bytes += done.bytes
            receipt.digests += sorted(done.digests.values())
            receipt.arena_bytes += held
        if not receipt.files:
            raise Refusal(
                HTTPStatus.NOT_FOUND, "field 'user': no memory of this user is stored", "user"
            )
        call.request.app.state.inferscale_idempotency.forget(call.user)
        call.count(files=receipt.files)
        return JSONResponse(receipt.model_dump())

    return await call.once(idempotency_key, carry_out)


def attach_memory_api(app: FastAPI) -> None:
    """Adds the routes."""
    app.include_router(router)
    app.add_middleware(UndecodedPaths)
