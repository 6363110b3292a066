"""Manifests from files: read, checked by the models of the API, with defaults written out; pure.

What an API server would refuse is refused here: wrong types and values, unknown fields, a second
object of a name, a moved store. Every problem is one line that names file, document, object, field,
value and mend.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from inferscale_operator.api.base import API_VERSION
from inferscale_operator.api.memorystore import MemoryStore
from inferscale_operator.api.personalizedmodel import PersonalizedModel
from inferscale_operator.desired.kinds import Manifest

DEFAULT_NAMESPACE = "default"
MODELS: Mapping[str, type[MemoryStore] | type[PersonalizedModel]] = {
    "MemoryStore": MemoryStore,
    "PersonalizedModel": PersonalizedModel,
}
_PLAIN_FIELDS = {
    "ConfigMap": frozenset({"data", "binaryData", "immutable"}),
    "Secret": frozenset({"data", "stringData", "immutable", "type"}),
}
_ORDER = ("ConfigMap", "Secret", "MemoryStore", "PersonalizedModel")
_ENVELOPE = frozenset({"apiVersion", "kind", "metadata"})
_VALUE_LENGTH = 80


class DocumentError(Exception):
    """Manifests that cannot be used.

    Attributes:
        problems: One line each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a document stands."""

    file: str
    number: int
    name: str = ""

    def says(self, text: str) -> str:
        """A problem as a line."""
        name = f" ({self.name})" if self.name else ""
        return f"{self.file}: document {self.number}{name}: {text}"


def read_documents(texts: Mapping[str, str]) -> list[Manifest]:
    """Reads all files.

    Args:
        texts: Content by the name of the file.

    Returns:
        Manifests in the order in which they are to be applied.

    Raises:
        DocumentError: With every problem that was found.
    """
    problems: list[str] = []
    found: dict[tuple[str, str, str], tuple[_Place, Manifest]] = {}
    for file, text in texts.items():
        try:
            documents = list(yaml.safe_load_all(text))
        except yaml.YAMLError as error:
            problems.append(f"{file}: not YAML: {' '.join(str(error).split())}")
            continue
        for number, document in enumerate(documents, 1):
            if document is None:
                continue
            place = _Place(file, number)
            try:
                place, manifest = _read(place, document)
            except DocumentError as error:
                problems += error.problems
                continue
            key = (manifest["kind"], manifest["metadata"]["namespace"], place.name)
            if key in found:
                problems.append(place.says(f"is also {found[key][0].says('here')}; remove one"))
            found[key] = (place, manifest)
    if not found and not problems:
        problems.append(f"{', '.join(texts)}: no document; write a MemoryStore to begin with")
    if problems:
        raise DocumentError(problems)
    manifests = [manifest for _, manifest in found.values()]
    return sorted(manifests, key=lambda item: _ORDER.index(item["kind"]))


def without_routers(manifests: Sequence[Manifest]) -> tuple[list[Manifest], list[str]]:
    """Manifests of models without their routers, which need an API server to find pods.

    Returns:
        The manifests, and the names of the models whose router was left out.
    """
    kept, names = [], []
    for manifest in manifests:
        routing = (manifest.get("spec") or {}).get("routing") or {}
        if manifest["kind"] == "PersonalizedModel" and routing.get("provider", "none") != "none":
            names.append(manifest["metadata"]["name"])
            spec = {**manifest["spec"], "routing": {**routing, "provider": "none"}}
            manifest = {**manifest, "spec": spec}
        kept.append(manifest)
    return kept, names


def moved_store(live: Manifest | None, wanted: Manifest) -> str | None:
    """Why a MemoryStore cannot take this spec in place of its present one, or None."""
    if live is None or wanted["kind"] != "MemoryStore":
        return None
    place = _place_of_store(live)
    if place == _place_of_store(wanted):
        return None
    name = wanted["metadata"]["name"]
    return (
        f"MemoryStore/{name}: spec.storage: the place of a store cannot be changed; "
        "make another MemoryStore"
    )


def existing_claims(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(field, name) of the claims that a spec expects to be there."""
    spec = manifest.get("spec") or {}
    for path in ("model.cache.claimName", "source.pvc.claimName", "storage.pvc.claimName"):
        value: Any = spec
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value:
            yield f"spec.{path}", str(value)


def _read(place: _Place, document: Any) -> tuple[_Place, Manifest]:
    if not isinstance(document, dict):
        raise DocumentError([place.says(f"is {_show(document)}; write a Kubernetes object")])
    kind, version = document.get("kind"), document.get("apiVersion")
    wanted = API_VERSION if kind in MODELS else "v1"
    if kind not in _ORDER or version != wanted:
        raise DocumentError(
            [
                place.says(
                    f"kind {_show(kind)} of apiVersion {_show(version)} is not run here; "
                    f"use MemoryStore or PersonalizedModel of {API_VERSION}, ConfigMap or Secret "
                    "of v1"
                )
            ]
        )
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise DocumentError([place.says(f"{kind}: metadata.name is missing; give it a name")])
    place = _Place(place.file, place.number, f"{kind}/{metadata['name']}")
    namespace = metadata.get("namespace") or DEFAULT_NAMESPACE
    manifest = {**document, "metadata": {**metadata, "namespace": namespace}}
    problems = list(_unknown_in_envelope(manifest))
    if kind in MODELS:
        manifest, more = _checked(MODELS[kind], manifest)
        problems += more
    else:
        manifest, more = _plain(manifest)
        problems += more
    if problems:
        raise DocumentError([place.says(problem) for problem in problems])
    return _Place(place.file, place.number, metadata["name"]), manifest


def _unknown_in_envelope(manifest: Manifest) -> Iterator[str]:
    kind = manifest["kind"]
    known = _ENVELOPE | (_PLAIN_FIELDS.get(kind) or {"spec", "status"})
    for key in sorted(set(map(str, manifest)) - known):
        yield f"field '{key}' is unknown; {kind} has {', '.join(sorted(known - _ENVELOPE))}"


def _checked(
    model: type[MemoryStore] | type[PersonalizedModel], manifest: Manifest
) -> tuple[Manifest, list[str]]:
    content = {"metadata": manifest["metadata"], "spec": manifest.get("spec", {})}
    problems = list(_unknown_fields(model, content, ""))
    try:
        parsed = model.model_validate(content)
    except ValidationError as error:
        return manifest, problems + [_describe(item) for item in error.errors(include_url=False)]
    spec = parsed.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    kept = {key: manifest[key] for key in ("apiVersion", "kind", "metadata")}
    return {**kept, "spec": spec}, problems


def _describe(item: Any) -> str:
    path = _path(item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "missing":
        return f"{path} is missing; add it"
    return f"{path} {_show(item.get('input'))}: {message}"


def _path(location: Sequence[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "document"


def _show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "(a map)" if isinstance(value, dict) else "(a list)"
    text = repr(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."


def _unknown_fields(model: type[BaseModel], content: Any, path: str) -> Iterator[str]:
    """Fields that the model does not have; pydantic ignores them for the sake of version skew."""
    if not isinstance(content, dict):
        return
    known = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, value in content.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in known:
            names = ", ".join(sorted(known))
            yield f"{here} is unknown; {path or 'the object'} has {names}"
            continue
        for part in _models(known[key]):
            items = value if isinstance(value, list) else [value]
            for number, item in enumerate(items):
                inner = f"{here}[{number}]" if isinstance(value, list) else here
                yield from _unknown_fields(part, item, inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models inside an annotation: itself, of a union, of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not dict:
        for part in get_args(annotation):
            if part is not Union:
                yield from _models(part)


def _plain(manifest: Manifest) -> tuple[Manifest, list[str]]:
    """A ConfigMap or Secret, as an API server would keep it."""
    problems = []
    for field in ("data", "binaryData", "stringData"):
        values = manifest.get(field)
        if values is None:
            continue
        if not isinstance(values, dict):
            problems.append(f"{field} is not a map; write 'key: text'")
            continue
        # The values are left out: they are facts and secrets.
        problems += [
            f"{field}.{key} is not a text; put it into quotes"
            for key, value in values.items()
            if not isinstance(value, str)
        ]
    if problems or manifest["kind"] != "Secret":
        return manifest, problems
    encoded = {
        key: base64.b64encode(value.encode()).decode()
        for key, value in (manifest.get("stringData") or {}).items()
    }
    kept = {key: value for key, value in manifest.items() if key != "stringData"}
    return {**kept, "data": {**(manifest.get("data") or {}), **encoded}}, []


def _place_of_store(manifest: Manifest) -> tuple[Any, ...]:
    storage = manifest["spec"].get("storage") or {}
    s3, pvc = storage.get("s3") or {}, storage.get("pvc") or {}
    return (s3.get("url"), s3.get("endpointUrl"), pvc.get("claimName"))
