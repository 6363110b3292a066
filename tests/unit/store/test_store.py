from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscale_runtime.errors import (
    ConfigError,
    StoreConflictError,
    StoreFormatError,
    StoreUnwritableError,
)
from inferscale_runtime.store import manifest, writer
from inferscale_runtime.store.records import Fact, Turn, UserMemory
from inferscale_runtime.store.store import NewSegment, Store


def kv_of(store, memory, fp):
    table = memory.encodings[fp]
    return dict(zip(table, store.read_segments(memory.user, list(table.values())), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_trip(store, kit, dtype):
    segments = [kit.segment(i, dtype) for i in range(4)]
    done = store.commit_user(kit.memory(), {kit.FP: segments})
    again = Store.open(store.url).read_user("ana")
    assert done.version == again.version == kit.version(store, "ana") == 1
    assert again.facts == done.facts
    assert again.turns == done.turns
    assert again.encodings == done.encodings
    assert np.array_equal(again.embeddings, kit.memory().embeddings)
    found = kv_of(store, again, kit.FP)
    for segment in segments:
        assert found[segment.fact_id].dtype == dtype
        assert torch.equal(found[segment.fact_id], segment.kv)
    assert store.verify() == []
    assert list(store.users()) == ["ana"]


def test_unknown_user(store, kit):
    assert store.read_user("nobody") is None
    assert kit.version(store, "nobody") == 0
    assert store.remove_user("nobody").files == 0
    assert list(store.users()) == store.fingerprints() == store.verify() == []


def test_conflict_keeps_the_first_write(store, kit):
    base = kit.filled(store)
    first = store.commit_user(dataclasses.replace(base, embedder="first"), {})
    with pytest.raises(StoreConflictError, match="version 2"):
        store.commit_user(dataclasses.replace(base, embedder="second"), {})
    with pytest.raises(StoreConflictError):
        store.commit_user(kit.memory(), {})
    assert store.read_user("ana").embedder == "first"
    assert first.version == 2


def test_removed_fact_loses_its_segment_and_dead_rows_are_compacted(store, kit, folder_of):
    base = kit.filled(store)
    before = kv_of(store, base, kit.FP)
    smaller = dataclasses.replace(base, facts=base.facts[:3], embeddings=base.embeddings[:3])
    done = store.commit_user(smaller, {})
    assert list(done.encodings[kit.FP]) == ["f0", "f1", "f2"]
    assert sum(s.num_tokens for s in done.encodings[kit.FP].values()) == sum(
        len(kv) for kv in kv_of(store, done, kit.FP).values()
    )
    assert torch.equal(kv_of(store, done, kit.FP)["f2"], before["f2"])
    [path] = folder_of("ana").glob("kv-*")
    assert before["f3"].numpy().tobytes() not in path.read_bytes()
    without = dataclasses.replace(done, facts=done.facts[1:], embeddings=done.embeddings[1:])
    done = store.commit_user(without, {})
    assert done.encodings == {}, "all others had read f0"
    assert list(folder_of("ana").glob("kv-*")) == list(folder_of("ana").glob("index-*")) == []
    assert len(list(folder_of("ana").iterdir())) == 4  # manifest, lock, facts, turns
    assert store.verify() == []


def test_segment_is_replaced_and_old_file_shared_until_mostly_dead(store, kit):
    base = kit.filled(store)
    done = store.commit_user(base, {kit.FP: [kit.segment(1, seed=7)]})
    assert len({s.file for s in done.encodings[kit.FP].values()}) == 2
    found = kv_of(store, store.read_user("ana"), kit.FP)
    assert torch.equal(found["f1"], kit.segment(1, seed=7).kv)
    assert torch.equal(found["f3"], kit.segment(3).kv)


def test_bytes_do_not_depend_on_order(tmp_path, kit):
    trees = []
    for n in range(3):
        store = Store.open(str(tmp_path / str(n)), create=True)
        segments = [kit.segment(i) for i in range(4)]
        random.Random(n).shuffle(segments)
        fps = [kit.FP, "cd" * 32]
        kit_map = {fp: segments for fp in (fps if n % 2 else fps[::-1])}
        store.commit_user(kit.memory(), kit_map)
        files = (p for p in Path(store.url).rglob("*") if p.is_file())
        trees.append({str(p.relative_to(store.url)): p.read_bytes() for p in files})
    assert trees[0] == trees[1] == trees[2]


def test_two_fingerprints_with_their_own_shapes(store, kit):
    other = dataclasses.replace(kit.segment(0), kv=torch.zeros(2, 3, 2, 2, 8).half())
    done = store.commit_user(kit.memory(), {kit.FP: [kit.segment(1)], "cd" * 32: [other]})
    assert kv_of(store, done, "cd" * 32)["f0"].shape == (2, 3, 2, 2, 8)
    stats = store.stats()
    assert stats.segments == {kit.FP: 1, "cd" * 32: 1}
    assert (stats.users, stats.facts, stats.garbage_bytes, stats.damaged) == (1, 4, 0, ())


def test_remove_user_touches_nobody_else(store, kit, folder_of):
    kit.filled(store)
    kit.filled(store, "bob")
    found = {p.name: p.read_bytes() for p in folder_of("ana").iterdir() if p.name != ".lock"}
    receipt = store.remove_user("ana")
    assert (receipt.files, receipt.bytes) == (5, sum(map(len, found.values())))
    assert receipt.digests == {n: hashlib.sha256(data).hexdigest() for n, data in found.items()}
    assert store.leftovers("ana") == []
    assert not folder_of("ana").exists()
    assert store.read_user("ana") is None
    assert store.verify() == []
    assert len(store.read_user("bob").facts) == 4
    assert kit.filled(store).version == 1


def test_preamble(store, kit):
    kv = kit.kv(1, 3, torch.bfloat16)
    store.write_preamble(kit.FP, {"model": "m", "layers": 2}, [5, 6, 7], kit.kv(2, 3))
    store.write_preamble(kit.FP, {"model": "m", "layers": 2}, [5, 6, 7], kv)
    fields, tokens, found = store.read_preamble(kit.FP)
    assert (fields, tokens) == ({"model": "m", "layers": 2}, (5, 6, 7))
    assert torch.equal(found, kv)
    assert store.fingerprints() == [kit.FP]
    assert store.read_preamble("cd" * 32) is None
    assert store.verify() == []
    assert len(list(Path(store.url, "preambles").glob("*.safetensors"))) == 1


def test_memory_file_system(kit):
    store = Store.open("memory://inferscale-test", create=True)
    done = kit.filled(store)
    assert torch.equal(kv_of(store, done, kit.FP)["f2"], kit.segment(2).kv)
    store.write_preamble(kit.FP, {}, [1, 2], kit.kv(1, 2))
    assert store.read_preamble(kit.FP)[1] == (1, 2)
    assert store.verify() == []
    assert store.stats().garbage_bytes == 0
    assert store.commit_user(done, {}).version == 2
    assert store.remove_user("ana").files == 5
    assert store.read_user("ana") is None


def test_segment_cannot_name_another_users_file(store, kit, folder_of):
    bob = kit.filled(store, "bob")
    segment = bob.encodings[kit.FP]["f0"]
    stolen = dataclasses.replace(segment, file=f"../{folder_of('bob').name}/{segment.file}")
    assert isinstance(store.read_segments("ana", [stolen])[0], Exception)
    with pytest.raises(ConfigError, match="does not have"):
        store.commit_user(
            dataclasses.replace(kit.memory(), encodings={kit.FP: {"f0": segment}}), {}
        )


@pytest.mark.parametrize("user", ["", "a\0b", "é" * 257, "\ud800"])
def test_user_id_limits(store, kit, user):
    with pytest.raises(ConfigError, match="user id"):
        store.commit_user(kit.memory(user), {})


def test_limits(store, kit, monkeypatch):
    base = kit.memory()

    def refuse(match, memory=base, new=None):
        with pytest.raises(ConfigError, match=match) as caught:
            store.commit_user(memory, new or {})
        assert "secret" not in str(caught.value)
        assert store.read_user("ana") is None

    long = (Fact("f0", "secret" * 1366),)
    refuse("8192", dataclasses.replace(base, facts=long, embeddings=base.embeddings[:1]))
    refuse("occurs twice", dataclasses.replace(base, facts=base.facts[:1] * 4))
    refuse("embeddings", dataclasses.replace(base, embeddings=base.embeddings[:3]))
    bad = (Turn("t", "", "secret \ud800"),)
    refuse("Unicode", dataclasses.replace(base, turns=bad))
    refuse("fingerprint", new={"../x": [kit.segment(0)]})
    refuse("not one of its facts", new={kit.FP: [kit.segment(9)]})
    refuse("encoded twice", new={kit.FP: [kit.segment(0)] * 2})
    wrong = dataclasses.replace(kit.segment(0), kv=kit.kv(0, 9))
    refuse("shape", new={kit.FP: [wrong]})
    wrong = dataclasses.replace(kit.segment(0), kv=kit.kv(0, 2, torch.float64))
    refuse("dtype", new={kit.FP: [wrong]})
    refuse("differs", new={kit.FP: [kit.segment(0), kit.segment(1, torch.float16)]})
    monkeypatch.setattr(writer, "MAX_FACTS", 3)
    refuse("limit is 3")
    monkeypatch.setattr(writer, "MAX_FACTS", 4)
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    refuse("manifest")


def test_open_refuses(tmp_path):
    with pytest.raises(StoreFormatError, match="no store"):
        Store.open(str(tmp_path))
    marker = tmp_path / "inferscale-store.json"
    for version, match in ((3, "Upgrade"), (0, "no store"), ("1", "no store")):
        marker.write_text(json.dumps({"format": "inferscale-store", "version": version}))
        with pytest.raises(StoreFormatError, match=match):
            Store.open(str(tmp_path), create=True)
    marker.write_text("{")
    with pytest.raises(StoreFormatError, match="not readable"):
        Store.open(str(tmp_path))
    with pytest.raises(StoreFormatError):
        Store.open("nosuchprotocol://x")


def test_unwritable(tmp_path, store, kit):
    (tmp_path / "plain").write_text("")
    with pytest.raises(StoreUnwritableError, match="cannot be written"):
        Store.open(str(tmp_path / "plain/store"), create=True)
    Path(store.url, "users").write_text("")
    with pytest.raises(StoreUnwritableError):
        store.commit_user(kit.memory(), {})


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
maybe = st.none() | texts


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    user=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    ids=st.lists(texts, unique=True, max_size=5),
    data=st.data(),
)
def test_any_memory_round_trips(store, kit, user, ids, data):
    facts = tuple(Fact(i, data.draw(texts), data.draw(maybe), data.draw(maybe)) for i in ids)
    turns = tuple(Turn(i, data.draw(texts), data.draw(texts), data.draw(maybe)) for i in ids)
    width = data.draw(st.integers(0, 3))
    rows = np.arange(len(ids) * width, dtype=np.float32).reshape(len(ids), width)
    new = []
    for n, fact_id in enumerate(data.draw(st.permutations(ids))):
        tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
        context = tuple(data.draw(st.lists(texts, max_size=3)))
        kv = kit.kv(n, len(tokens))
        new.append(NewSegment(fact_id, "k", tuple(tokens), context, context, kv))
    memory = UserMemory(user, kit.version(store, user), facts, turns, "e", rows)
    done = store.commit_user(memory, {kit.FP: new})
    again = store.read_user(user)
    assert (again.user, again.facts, again.turns) == (user, facts, turns)
    assert again.encodings == done.encodings
    assert again.embeddings.shape == rows.shape
    assert np.array_equal(again.embeddings, rows)
    table = again.encodings.get(kit.FP, {})
    found = store.read_segments(user, [table[s.fact_id] for s in new])
    assert all(torch.equal(a, s.kv) for a, s in zip(found, new, strict=True))
    assert store.verify(user) == []


@pytest.mark.parametrize("url", ["local", "memory://inferscale-recent"])
def test_recent_users_last_written_first(url, kit, tmp_path):
    store = Store.open(str(tmp_path / "store") if url == "local" else url, create=True)
    kit.filled(store, "ana")
    kit.filled(store, "bob")
    store.commit_user(store.read_user("ana"), {})
    found = list(store.recent_users())
    assert [user for _, user in found] == ["ana", "bob"]
    assert found[0][0] >= found[1][0] > 1_600_000_000
    store.remove_user("bob")
    assert [user for _, user in store.recent_users()] == ["ana"]


def test_recent_users_pass_damaged_ones_over(store, kit, folder_of):
    kit.filled(store, "ana")
    kit.filled(store, "bob")
    (folder_of("bob") / "manifest.json").write_text("damaged")
    assert [user for _, user in store.recent_users()] == ["ana"]
