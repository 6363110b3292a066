"""Custom resources of the operator's tests."""

from __future__ import annotations

from typing import Any

MODEL = {"id": "builtin:smollm2-135m", "dtype": "float32"}


def facts(name: str = "facts", text: str = "likes tea") -> dict[str, Any]:
    """A ConfigMap with one fact."""
    line = f'{{"user": "u", "id": "1", "text": "{text}"}}'
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"facts.jsonl": line},
    }


def memory_store(name: str, **spec: Any) -> dict[str, Any]:
    """A MemoryStore whose facts come from the ConfigMap ``facts``."""
    return {
        "apiVersion": "inferscale.dev/v1alpha1",
        "kind": "MemoryStore",
        "metadata": {"name": name},
        "spec": {"model": MODEL, "source": {"configMap": {"name": "facts"}}, **spec},
    }


def personalized_model(name: str, *stores: str, **spec: Any) -> dict[str, Any]:
    """A PersonalizedModel with these stores."""
    return {
        "apiVersion": "inferscale.dev/v1alpha1",
        "kind": "PersonalizedModel",
        "metadata": {"name": name},
        "spec": {"model": MODEL, "memoryStores": [{"name": store} for store in stores], **spec},
    }
