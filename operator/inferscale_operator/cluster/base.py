"""What the operator needs of a Kubernetes API; the real one and the one of ``up`` both have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from inferscale_operator.desired.kinds import Kind, Manifest
from inferscale_operator.planner.plan import EventRecord


class Cluster(Protocol):
    """Reads and writes objects. Errors are those of ``cluster.errors``."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Manifest | None:
        """The live object, or None."""

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """All objects of a kind, in one namespace or in all, with these labels."""

    async def create(self, manifest: Manifest) -> Manifest:
        """Makes an object; ``AlreadyExistsError`` when there is one."""

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply with the operator's field manager, forced."""

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes; gone already, or another uid, is no error.

        In the background, but Jobs in the foreground: such a Job stays until its pods are gone,
        because two jobs must not write one store at once.
        """

    async def patch_status(self, live: Manifest, status: Manifest) -> Manifest:
        """Replaces the status of a custom resource, if it is still ``live``'s version."""

    async def scale(self, live: Manifest, replicas: int) -> None:
        """Writes the size through the scale subresource, if it is still ``live``'s version."""

    async def annotate(self, live: Manifest, key: str, value: str) -> None:
        """Sets one annotation of an object, if it has not been made anew."""

    async def set_finalizer(self, live: Manifest, finalizer: str, *, present: bool) -> Manifest:
        """Adds or removes one finalizer, if the object is still ``live``'s version."""

    async def post_event(self, owner: Manifest, event: EventRecord) -> None:
        """Posts an Event about a custom resource; a failure is logged, not raised."""

    async def knows(self, kind: Kind) -> bool:
        """Whether the cluster serves a kind."""

    async def read_pod(self, pod: Manifest, port: str, path: str) -> str | None:
        """GET of a text from a pod's named port; None when it does not answer in 2 s."""

    async def ask_pod(self, pod: Manifest, port: str, path: str) -> Mapping[str, object] | None:
        """GET of a JSON object from a pod's named port; None when it does not answer in 2 s."""
