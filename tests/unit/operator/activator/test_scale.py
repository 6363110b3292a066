"""Waking through the scale subresource: only a size of 0 is changed, and only if it still is 0."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale_operator.activator.scale import Scale
from inferscale_operator.activator.servers import WakeError
from inferscale_operator.cluster.errors import ClusterError, ConflictError, UnavailableError

pytestmark = pytest.mark.asyncio
PATH = "/apis/inferscale.dev/v1alpha1/namespaces/ns/personalizedmodels/m/scale"


class Api:
    """A transport that answers with one Scale."""

    def __init__(self, replicas: int | None, error: ClusterError | None = None) -> None:
        self.spec = {} if replicas is None else {"replicas": replicas}
        self.error = error
        self.patches: list[Any] = []

    async def request(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        assert path == PATH
        if method == "PATCH":
            self.patches.append(how["body"])
            if self.error is not None:
                raise self.error
        return {"metadata": {"resourceVersion": "7"}, "spec": self.spec}


@pytest.mark.parametrize(("replicas", "written"), [(0, True), (None, True), (1, False), (5, False)])
async def test_only_0_is_changed(replicas: int | None, written: bool) -> None:
    api = Api(replicas)
    await Scale(api, "ns", "m", 2).wake()  # type: ignore[arg-type]
    wanted = {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 2}}
    assert api.patches == ([wanted] if written else [])


async def test_another_writer_is_not_overruled() -> None:
    await Scale(Api(0, ConflictError("409")), "ns", "m", 1).wake()  # type: ignore[arg-type]


async def test_other_failures_are_said() -> None:
    with pytest.raises(WakeError, match="no answer"):
        await Scale(Api(0, UnavailableError("no answer")), "ns", "m", 1).wake()  # type: ignore[arg-type]
