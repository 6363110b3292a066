"""Real stores, arena and service around a toy model: one token a character, two layers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inferscale_runtime.config import PromptConfig, RuntimeConfig, StoreEntry
from inferscale_runtime.prompt.template import Template
from inferscale_runtime.server.identity import Identity
from inferscale_runtime.server.service import MemoryService
from inferscale_runtime.server.stores import Embedders, ServedStore
from inferscale_runtime.store.records import Fact, UserMemory
from inferscale_runtime.store.store import NewSegment, Store
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.form import SlabForm
from inferscale_runtime.tiers.slab import SlabShape, create_run_files, map_leases, map_slab

FINGERPRINT = "ab" * 32
OTHER = "cd" * 32


def render(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def tokenize(text: str) -> list[int]:
    return [ord(char) for char in text]


def template(heading: str) -> Template:
    return Template(render, tokenize, PromptConfig(heading=heading, footer="."))


class ToyEmbedder:
    """Counts letters; ``loads`` tells how often each was loaded."""

    loads: list[str]

    def __init__(self, name: str) -> None:
        self.name, self.dim = name, 26

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        rows = np.zeros((len(texts), 26), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for char in text.lower():
                if char.isascii() and char.isalpha():
                    row[ord(char) - 97] += 1
            row /= np.linalg.norm(row) or 1
        return rows


def kv(rows: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((rows, 2, 2, 1, 4), value)


def commit(
    store: Store,
    user: str,
    texts: Sequence[str],
    *,
    fingerprints: Sequence[str] = (FINGERPRINT,),
    embedder: str = "toy",
) -> None:
    """Writes a user's facts, encoded under each fingerprint."""
    old = store.read_user(user)
    facts = tuple(Fact(str(n), text, None, None) for n, text in enumerate(texts))
    rows = ToyEmbedder(embedder).embed(texts)
    memory = UserMemory(user, old.version if old else 0, facts, (), embedder, rows)
    shaped = template("x")
    segments = {}
    for fingerprint in fingerprints:
        segments[fingerprint] = [
            NewSegment(
                fact.id,
                hashlib.sha256(f"{user} {fact.text} {fingerprint}".encode()).hexdigest(),
                tuple(shaped.fact_token_ids(fact.text)),
                (),
                (),
                kv(len(shaped.fact_token_ids(fact.text))),
            )
            for fact in facts
        ]
    store.commit_user(memory, segments)


def add_encoding(
    store: Store, fingerprint: str = FINGERPRINT, heading: str = "Facts:", embedder: str = "toy"
) -> None:
    """Writes a preamble, which is what makes an encoding."""
    ids = template(heading).preamble().token_ids
    fields = {"heading": heading, "embedder": embedder}
    store.write_preamble(fingerprint, fields, ids, kv(len(ids)))


def find(own: Sequence[str]) -> Callable[[Store, str | None], Identity]:
    """As ``find_identity``, where ``own`` are the fingerprints that fit the model."""

    def look(store: Store, expected: str | None) -> Identity:
        names = [n for n in store.fingerprints() if expected in (None, n)]
        for name in names:
            if name in own:
                stored = store.read_preamble(name)
                assert stored is not None
                fields, _, preamble_kv = stored
                shaped = template(str(fields["heading"]))
                embedder = str(fields["embedder"])
                return Identity(shaped, shaped.preamble(), name, preamble_kv, None, embedder)
        shaped = template("Facts:")
        reason = "fingerprint_mismatch" if names else "not_encoded"
        if expected is not None and not names:
            reason = "expected_fingerprint_missing"
        return Identity(shaped, shaped.preamble(), "", None, reason)

    return look


class World:
    """Stores below one folder and a service over them."""

    def __init__(self, folder: Path, num_rows: int = 4096) -> None:
        self.folder = folder
        self.loads: list[str] = []
        self.broken_embedders: set[str] = set()
        self.own = [FINGERPRINT]
        run_dir = folder / "run"
        run_dir.mkdir()
        shape = SlabShape(num_rows, num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
        create_run_files(run_dir, shape)
        form = SlabForm(shape, run_dir)
        self.arena = Arena(map_slab(run_dir, shape), map_leases(run_dir), form=form)

    def url(self, name: str) -> str:
        return str(self.folder / name)

    def store(self, name: str) -> Store:
        return Store.open(self.url(name), create=True)

    def load_embedder(self, name: str, *, api_key_file: str | None = None) -> ToyEmbedder:
        from inferscale_runtime.errors import ConfigError

        self.loads.append(name)
        if name in self.broken_embedders:
            raise ConfigError(f"embedder '{name}' is broken")
        return ToyEmbedder(name)

    def service(
        self, *names: str, pins: dict[str, str] | None = None, **sections: Any
    ) -> MemoryService:
        entries = tuple(
            StoreEntry(name=name, url=self.url(name), expected_fingerprint=(pins or {}).get(name))
            for name in names
        )
        config = RuntimeConfig(stores=entries, **sections)
        stores = {e.name: ServedStore(e, self.arena, 5.0) for e in config.store_entries}
        embedders = Embedders(None, self.load_embedder)

        def refresh() -> None:
            for served in stores.values():
                served.refresh(find(self.own), lambda i: i.embedder or "toy", embedders)

        refresh()
        return MemoryService(config, stores, self.arena, b"s" * 32, refresh)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """What the tests build with; test modules cannot import each other."""
    return SimpleNamespace(
        FINGERPRINT=FINGERPRINT,
        OTHER=OTHER,
        World=World,
        commit=commit,
        add_encoding=add_encoding,
        tokenize=tokenize,
    )
