"""Waking a model through the scale subresource, and finding its servers by their Service."""

from __future__ import annotations

import aiohttp

from inferscale_operator.activator.servers import WakeError
from inferscale_operator.cluster.errors import ClusterError, ConflictError
from inferscale_operator.cluster.transport import MERGE_PATCH, Transport, path_of
from inferscale_operator.desired.kinds import PERSONALIZED_MODEL

READY_PATH = "/inferscale/v1/ready"
LOOK_SECONDS = 2.0
MANAGER = "inferscale-activator"


class Scale:
    """The size of one PersonalizedModel.

    Args:
        transport: To the API server.
        namespace: Of the model.
        name: Of the model.
        replicas: Size to wake it in.
    """

    def __init__(self, transport: Transport, namespace: str, name: str, replicas: int) -> None:
        self._transport = transport
        self._path = path_of(PERSONALIZED_MODEL, namespace, name, "scale")
        self._replicas = replicas

    async def wake(self) -> None:
        """Makes the size larger if it is 0, and leaves every other size alone.

        Raises:
            WakeError: The API server refuses, or does not answer.
        """
        try:
            live = await self._transport.request("GET", self._path)
            if int((live.get("spec") or {}).get("replicas") or 0) > 0:
                return
            # Another writer may have woken it in the meantime: its size stays then.
            version = live["metadata"]["resourceVersion"]
            await self._transport.request(
                "PATCH",
                self._path,
                body={
                    "metadata": {"resourceVersion": version},
                    "spec": {"replicas": self._replicas},
                },
                query={"fieldManager": MANAGER},
                content_type=MERGE_PATCH,
            )
        except ConflictError:
            return
        except (ClusterError, KeyError) as error:
            raise WakeError(str(error)) from error


class ServiceProbe:
    """Whether a Service leads to a ready server.

    Args:
        session: For requests.
        address: URL of the Service without a path.
    """

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._address = address

    async def find(self) -> str | None:
        """The address, when a server behind it says that it is ready."""
        try:
            async with self._session.get(
                f"{self._address}{READY_PATH}",
                timeout=aiohttp.ClientTimeout(total=LOOK_SECONDS),
                allow_redirects=False,
            ) as answer:
                return self._address if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
