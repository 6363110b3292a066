"""What a server is told about a MemoryStore, and where a store lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferscale_operator.api.memorystore import MemoryStoreSpec, PvcStorage, S3Location


@dataclass(frozen=True, slots=True)
class StoreView:
    """A MemoryStore as a server uses it.

    Attributes:
        name: Its name.
        spec: Its spec.
        fingerprint: Of the encoding to use.
    """

    name: str
    spec: MemoryStoreSpec
    fingerprint: str


def store_claim(name: str, spec: MemoryStoreSpec) -> str | None:
    """Name of the claim that a store lies in; None for object storage.

    Args:
        name: Name of the MemoryStore.
        spec: Its spec.
    """
    if spec.storage.s3 is not None:
        return None
    given = spec.storage.pvc.claim_name if spec.storage.pvc is not None else None
    return given or f"{name}-store"


def store_url(name: str, spec: MemoryStoreSpec, mount_path: str) -> str:
    """What the runtime is told to open: the S3 URL, or a folder of the mounted claim.

    An existing claim may hold other things, and other stores: each has a folder of its own there.
    It is not mounted by ``subPath``, whose folders belong to root.
    """
    if spec.storage.s3 is not None:
        return spec.storage.s3.url
    given = spec.storage.pvc is not None and spec.storage.pvc.claim_name is not None
    return f"{mount_path}/{name}" if given else mount_path


def s3_conflict(places: Sequence[tuple[str, S3Location | None]]) -> str | None:
    """Why one pod cannot use several places in object storage; None when it can.

    Endpoint, region and credentials reach a pod as environment variables, so there is one of each.

    Args:
        places: Field (or store) that names a place, and the place.

    Returns:
        A sentence that names the fields and the mend.
    """
    given = [(field, place) for field, place in places if place is not None]
    for field, place in given[1:]:
        first_field, first = given[0]
        for part in ("endpoint_url", "region", "credentials_secret_ref"):
            if getattr(place, part) != getattr(first, part):
                alias = S3Location.model_fields[part].alias
                return (
                    f"{field}.{alias} differs from {first_field}.{alias}: one pod can use one S3 "
                    "endpoint, region and Secret; make them equal"
                )
    return None


def embedder_conflict(stores: Sequence[StoreView]) -> str | None:
    """Why one server cannot ask the stores' embedding endpoints; None when it can.

    Questions are embedded by the store's own local embedder, but an endpoint is a setting of the
    server, and there is one.

    Returns:
        A sentence that names the stores and the mend.
    """
    remote = remote_embedders(stores)
    for store in remote[1:]:
        first = remote[0]
        if (
            store.spec.encoding.embedder != first.spec.encoding.embedder
            or store.spec.encoding.embedder_api_key_secret_ref
            != first.spec.encoding.embedder_api_key_secret_ref
        ):
            return (
                f"spec.memoryStores: '{first.name}' and '{store.name}' use different embedding "
                "endpoints or API keys; serve them by different PersonalizedModels, or make "
                "spec.encoding of the stores equal"
            )
    return None


def remote_embedders(stores: Sequence[StoreView]) -> list[StoreView]:
    """The stores whose embedder is an endpoint."""
    return [store for store in stores if store.spec.encoding.embedder.startswith("openai:")]


def on_one_node(spec: MemoryStoreSpec) -> bool:
    """Whether the store lies in a claim of the operator that only one node can mount at a time."""
    if spec.storage.s3 is not None:
        return False
    pvc = spec.storage.pvc or PvcStorage()
    return pvc.claim_name is None and pvc.access_mode == "ReadWriteOnce"
