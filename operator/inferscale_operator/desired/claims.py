"""PersistentVolumeClaims: of stores and of model weights."""

from __future__ import annotations

from inferscale_operator.api.base import Model
from inferscale_operator.api.memorystore import MemoryStoreSpec, PvcStorage
from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import CLAIM, Manifest
from inferscale_operator.desired.quantities import canonical_quantity
from inferscale_operator.desired.stores import store_claim


def model_claim(owner: naming.Owner, component: str) -> str:
    """Name of the claim that is made for a resource's model weights."""
    suffix = "store-models" if component == "encoder" else "models"
    return f"{owner['metadata']['name']}-{suffix}"


def build_model_claim(owner: naming.Owner, model: Model, component: str) -> Manifest | None:
    """The claim for model weights; None when the spec names one or wants none.

    Args:
        owner: The custom resource.
        model: Of its spec.
        component: ``encoder`` or ``server``.
    """
    if model.cache.size is None or model.cache.claim_name is not None:
        return None
    name = model_claim(owner, component)
    cache = model.cache
    body = _claim(cache.size or "", cache.storage_class_name, "ReadWriteOnce")
    return naming.child(CLAIM, owner, name, component, body)


def build_store_claim(owner: naming.Owner, spec: MemoryStoreSpec) -> Manifest | None:
    """The claim of a store; None when the spec names one, or the store is in object storage."""
    storage = spec.storage.pvc or PvcStorage()
    name = store_claim(owner["metadata"]["name"], spec)
    if name is None or storage.claim_name is not None:
        return None
    body = _claim(storage.size, storage.storage_class_name, storage.access_mode)
    return naming.child(CLAIM, owner, name, "encoder", body)


def _claim(size: str, storage_class: str | None, access_mode: str) -> Manifest:
    spec: Manifest = {
        "accessModes": [access_mode],
        "resources": {"requests": {"storage": canonical_quantity(size)}},
        "volumeMode": "Filesystem",
    }
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {"spec": spec}
