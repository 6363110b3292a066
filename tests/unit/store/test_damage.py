"""A write that stops anywhere, and bytes that change afterwards."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from inferscale_runtime.errors import DamagedStoreError, StoreConflictError, StoreError
from inferscale_runtime.store import files
from inferscale_runtime.store.store import Store


def killed_at(n, action):
    """Runs the action in a child that stops like ``kill -9`` at its n-th file operation."""
    pid = os.fork()
    if pid == 0:
        left = [n]

        def step(name):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)

        files.on_step = step
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sweep(base, check):
    """Kills a fresh copy of ``base`` at each operation until one run completes."""
    for n in range(200):
        root = base.with_name(f"copy{n}")
        shutil.copytree(base, root)
        store = Store.open(str(root))
        code = killed_at(n, lambda store=store: check.write(store))
        assert code in (0, 9), f"operation {n} failed"
        check.read(store, done=code == 0)
        if code == 0:
            assert n > 3
            return
    raise AssertionError("the write never completed")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("first", [True, False])
def test_kill_at_every_operation_of_a_commit(store, kit, first):
    new = [kit.segment(0, seed=5), kit.segment(1, seed=5)]
    base = kit.memory(count=2) if first else kit.filled(store)
    target = base if first else dataclasses.replace(base, embedder="new")

    class Check:
        def write(self, store):
            store.commit_user(target, {kit.FP: new})

        def read(self, store, done):
            assert store.verify() == []
            version = kit.version(store, "ana")
            assert version in (base.version, base.version + 1)
            assert not done or version == base.version + 1
            memory = store.read_user("ana")
            if memory is not None:
                assert (memory.embedder == target.embedder) == (version != base.version)
                segments = list(memory.encodings[kit.FP].values())
                kv = store.read_segments("ana", segments)
                seed = 5 if version != base.version else 0
                assert torch.equal(kv[0], kit.segment(0, seed=seed).kv)
                assert all(isinstance(part, torch.Tensor) for part in kv)
            if version == base.version:
                assert store.commit_user(target, {kit.FP: new}).version == version + 1
            else:
                store.commit_user(store.read_user("ana"), {})
            assert store.verify() == []
            assert store.stats().garbage_bytes == 0

    sweep(Path(store.url), Check())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kill_at_every_operation_of_a_removal(store, kit):
    base = kit.filled(store)

    class Check:
        def write(self, store):
            store.remove_user("ana")

        def read(self, store, done):
            memory = store.read_user("ana")
            assert memory is None or memory.encodings == base.encodings
            assert store.verify() == []
            store.remove_user("ana")
            assert not list(Path(store.url, "users").iterdir())

    sweep(Path(store.url), Check())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kill_at_every_operation_of_a_preamble(store, kit):
    store.write_preamble(kit.FP, {"n": 0}, [1, 2], kit.kv(0, 2))

    class Check:
        def write(self, store):
            store.write_preamble(kit.FP, {"n": 1}, [1, 2], kit.kv(1, 2))

        def read(self, store, done):
            fields, _, kv = store.read_preamble(kit.FP)
            assert torch.equal(kv, kit.kv(fields["n"], 2))
            assert fields["n"] == 1 or not done
            assert store.verify() == []

    sweep(Path(store.url), Check())


def hurt(path, kit):
    """Yields the file in each broken state, then whole again."""
    data = path.read_bytes()
    for at in sorted({*range(0, len(data), max(1, len(data) // 16)), len(data) - 1}):
        kit.flip(path, at, at % 8)
        yield f"bit {at}"
        path.write_bytes(data)
    for size in (0, 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        yield f"cut {size}"
    path.write_bytes(data + b"x")
    yield "longer"
    path.unlink()
    yield "missing"
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["facts", "turns", "index", "kv", "manifest"])
def test_damage_to_a_users_file(store, kit, folder_of, kind, caplog):
    done = kit.filled(store)
    kit.filled(store, "bob")
    [path] = folder_of("ana").glob(f"{kind}*")
    segments = list(done.encodings[kit.FP].values())
    for what in hurt(path, kit):
        if kind == "manifest" and what == "missing":
            assert store.read_user("ana") is None
            continue
        problems = store.verify()
        assert problems, what
        assert all(path.name in problem for problem in problems), what
        assert store.verify("bob") == []
        if kind in ("facts", "turns", "manifest"):
            with pytest.raises(DamagedStoreError, match=path.name):
                store.read_user("ana")
        elif kind == "index":
            caplog.clear()
            memory = store.read_user("ana")
            assert memory.facts == done.facts
            assert memory.encodings == {}
            assert path.name in caplog.text
        else:
            found = store.read_segments("ana", segments)
            broken = [part for part in found if isinstance(part, DamagedStoreError)]
            assert broken, what
            assert all(part.path.endswith(path.name) for part in broken)
    assert store.verify() == []


def test_bit_flip_costs_one_segment_only(store, kit, folder_of):
    done = kit.filled(store)
    [path] = folder_of("ana").glob("kv*")
    kit.flip(path, path.stat().st_size - 1)
    found = store.read_segments("ana", list(done.encodings[kit.FP].values()))
    assert [isinstance(part, DamagedStoreError) for part in found] == [False] * 3 + [True]


def test_every_bit_of_a_kv_header(store, kit, folder_of):
    done = kit.filled(store, which=[0])
    [path] = folder_of("ana").glob("kv*")
    head = path.stat().st_size - 2 * 2 * 2 * 4 * 4
    for bit in range(8 * head):
        kit.flip(path, bit // 8, bit % 8)
        [part] = store.read_segments("ana", [done.encodings[kit.FP]["f0"]])
        assert isinstance(part, DamagedStoreError), bit
        kit.flip(path, bit // 8, bit % 8)


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_damage_to_a_preamble(store, kit, suffix):
    store.write_preamble(kit.FP, {"model": "m"}, [1, 2], kit.kv(0, 2))
    [path] = Path(store.url, "preambles").glob(f"*.{suffix}")
    for what in hurt(path, kit):
        if what == "missing" and suffix == "json":
            assert store.read_preamble(kit.FP) is None
            continue
        with pytest.raises(DamagedStoreError, match=path.name):
            store.read_preamble(kit.FP)
        assert any(path.name in problem for problem in store.verify()), what


def test_damage_to_the_marker(store, kit):
    path = Path(store.url, "inferscale-store.json")
    for _ in hurt(path, kit):
        try:
            Store.open(store.url)
        except StoreError:
            continue
        raise AssertionError("a damaged marker was accepted")


def test_encoding_again_mends_damage(store, kit, folder_of):
    done = kit.filled(store)
    for path in folder_of("ana").glob("*-*"):
        kit.flip(path, path.stat().st_size // 2)
    again = dataclasses.replace(kit.memory(), version=kit.version(store, "ana"))
    mended = store.commit_user(again, {kit.FP: [kit.segment(i) for i in range(4)]})
    assert mended.encodings == done.encodings
    assert store.verify() == []


def test_damaged_file_is_kept_unless_something_was_erased(store, kit, folder_of):
    base = kit.filled(store)
    [path] = folder_of("ana").glob("kv*")
    kit.flip(path, path.stat().st_size - 1)
    again = {kit.FP: [kit.segment(i, seed=1) for i in range(3)]}
    done = store.commit_user(base, again)
    assert done.encodings[kit.FP]["f3"].file == path.name
    assert store.verify("ana")
    done = store.commit_user(
        dataclasses.replace(done, facts=done.facts[1:], embeddings=done.embeddings[1:]), {}
    )
    assert not path.exists()
    assert done.encodings == {}
    assert store.verify("ana") == []


def test_readers_never_meet_a_mixture(store, kit):
    kit.filled(store)
    stop, errors = threading.Event(), []

    def read():
        other = Store.open(store.url)
        while not stop.is_set():
            try:
                memory = other.read_user("ana")
                if memory.embedder != "mini" and memory.facts[0].text != memory.embedder:
                    errors.append("mixture")
            except Exception as exc:
                errors.append(repr(exc))

    def write(count):
        for _ in range(count):
            memory = store.read_user("ana")
            text = str(memory.version)
            facts = tuple(dataclasses.replace(fact, text=text) for fact in memory.facts)
            try:
                store.commit_user(dataclasses.replace(memory, facts=facts, embedder=text), {})
            except StoreConflictError:
                continue

    threads = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(10,)) for _ in range(2)]
    for thread in threads + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.verify() == []
