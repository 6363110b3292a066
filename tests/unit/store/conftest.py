from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inferscale_runtime.store import writer
from inferscale_runtime.store.records import Fact, Turn, UserMemory
from inferscale_runtime.store.store import NewSegment, Store

FP = "ab" * 32


def make_kv(seed: int, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 2, 2, 1, 4, generator=generator).to(dtype)


def make_segment(i: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> NewSegment:
    tokens = tuple(range(i, i + 2 + i % 3))
    key = hashlib.sha256(f"{i} {seed}".encode()).hexdigest()
    kv = make_kv(i + 1000 * seed, len(tokens), dtype)
    return NewSegment(f"f{i}", key, tokens, ("f0",) if i else (), ("t0",), kv)


def make_memory(user: str = "ana", count: int = 4, version: int = 0) -> UserMemory:
    facts = tuple(Fact(f"f{i}", f"fact no {i}", "t0", None) for i in range(count))
    rows = np.eye(count, 8, dtype=np.float32)
    return UserMemory(user, version, facts, (Turn("t0", "Ana", "hello"),), "mini", rows)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def first_epoch(monkeypatch):
    """The drawn epoch of a new user is 0 here: tests count from it and compare bytes."""
    drawn = writer.first_epoch
    monkeypatch.setattr(writer, "first_epoch", lambda: 0)
    return drawn


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    def find(user: str) -> Path:
        return tmp_path / "store/users" / hashlib.sha256(user.encode()).hexdigest()[:32]

    return find


def filled(store: Store, user: str = "ana", which: Sequence[int] = (0, 1, 2, 3)) -> UserMemory:
    return store.commit_user(make_memory(user), {FP: [make_segment(i) for i in which]})


def version_of(store: Store, user: str = "ana") -> int:
    """A user's version, 0 for an unknown user; read from the manifest alone."""
    return next((found.version for found in store.user_stats() if found.user == user), 0)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """Helpers of the store's tests; test modules cannot import each other."""
    return SimpleNamespace(
        FP=FP,
        kv=make_kv,
        segment=make_segment,
        memory=make_memory,
        flip=flip,
        filled=filled,
        version=version_of,
    )
