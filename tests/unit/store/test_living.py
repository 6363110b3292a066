"""Single facts written, corrected and forgotten while others read and write."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inferscale_runtime.config import QuotaConfig
from inferscale_runtime.encode.changes import merge_memory
from inferscale_runtime.errors import ConfigError, PreconditionFailed, QuotaError
from inferscale_runtime.store import files, living, tables, writer
from inferscale_runtime.store import manifest as m
from inferscale_runtime.store.living import FactWrite
from inferscale_runtime.store.records import Fact
from inferscale_runtime.store.store import NewSegment, Store

FP = "ab" * 32
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def embed(texts):
    rows = np.zeros((len(texts), 8), np.float32)
    for row, text in zip(rows, texts, strict=True):
        row[sum(text.encode()) % 8] = 1
    return rows


def put(store, *pairs, user="ana", origin="api", embedder="mini", limits=None, **more):
    writes = [pair if isinstance(pair, FactWrite) else FactWrite(*pair) for pair in pairs]
    limits = limits or QuotaConfig()
    return living.put_facts(
        store, user, writes, origin=origin, embedder=embedder, embed=embed, limits=limits, **more
    )


def texts_of(store, user="ana"):
    memory = store.read_user(user)
    return {fact.id: fact.text for fact in memory.facts} if memory else None


def test_write_correct_and_forget(store, kit):
    base = kit.filled(store)
    same = FactWrite("f1", "fact no 1", turn_id="t0")
    done = put(store, same, ("f2", "corrected"), ("new", "new text"))
    assert (done.created, done.updated, done.unchanged) == (("new",), ("f2",), ("f1",))
    assert (done.version, done.epoch) == (2, 1)
    assert done.keys == (base.encodings[FP]["f2"].key,)
    memory = store.read_user("ana")
    assert [fact.id for fact in memory.facts] == ["f0", "f1", "f2", "f3", "new"]
    assert set(memory.encodings[FP]) == {"f0", "f1", "f3"}
    assert np.array_equal(memory.embeddings[2], embed(["corrected"])[0])
    corrected = memory.facts[2]
    assert (corrected.origin, memory.facts[1].origin) == ("api", "")
    assert TIME.fullmatch(corrected.created_at)
    assert corrected.created_at == corrected.updated_at
    assert put(store, ("new", "new text")).version == 2, "nothing changed, nothing is written"

    gone = living.delete_facts(store, "ana", ["f0", "nothing", "f0"])
    assert (gone.deleted, gone.missing, gone.invalidated) == (("f0",), ("nothing",), 2)
    assert (gone.version, gone.epoch) == (3, 2)
    assert set(gone.keys) == {base.encodings[FP][i].key for i in ("f0", "f1", "f3")}
    assert store.read_user("ana").encodings == {}
    assert texts_of(store).keys() == {"f1", "f2", "f3", "new"}
    assert living.delete_facts(store, "ana", ["f0"]).version == 3
    assert living.delete_facts(store, "nobody", ["f0"]).missing == ("f0",)
    assert store.verify() == []


def test_a_deleted_turn_leaves_its_facts_without_what_read_it(store, kit):
    kit.filled(store)
    gone = living.delete_turns(store, "ana", ["t0"])
    assert (gone.deleted, gone.invalidated, gone.epoch) == (("t0",), 4, 1)
    memory = store.read_user("ana")
    assert (memory.turns, memory.encodings) == ((), {})
    assert {fact.turn_id for fact in memory.facts} == {None}


def test_another_time_or_new_facts_keep_the_epoch(store, kit):
    kit.filled(store)
    write = FactWrite("f0", "fact no 0", time="2026-01-01", turn_id="t0")
    done = living.put_facts(
        store, "ana", [write], origin="api", embedder="mini", embed=embed, limits=QuotaConfig()
    )
    assert (done.updated, done.epoch, done.keys) == (("f0",), 0, ())
    assert len(store.read_user("ana").encodings[FP]) == 4
    assert put(store, ("n", "x")).epoch == 0


def test_nothing_of_what_was_forgotten_is_left_in_any_file(store, kit, folder_of):
    base = kit.filled(store)
    rows = store.read_segments("ana", list(base.encodings[FP].values()))
    put(store, ("canary-id", "canary text"))
    living.delete_facts(store, "ana", ["canary-id", "f0"])
    for path in folder_of("ana").iterdir():
        data = path.read_bytes()
        for kv in rows:
            assert kv[0].numpy().tobytes() not in data
        if path.suffix == ".parquet":
            data += repr(pq.read_table(path).to_pylist()).encode()
        assert b"canary" not in data
        assert b"fact no 0" not in data


def test_preconditions_and_limits(store):
    with pytest.raises(PreconditionFailed, match="version 0"):
        put(store, ("a", "x"), if_version=1)
    assert put(store, ("a", "x"), if_version=0).version == 1
    for call in (lambda: put(store, ("b", "x"), if_version=0),
                 lambda: living.delete_facts(store, "ana", ["a"], if_version=7),
                 lambda: living.delete_turns(store, "ana", ["a"], if_version=7)):  # fmt: skip
        with pytest.raises(PreconditionFailed):
            call()
    with pytest.raises(QuotaError, match="max_facts_per_user"):
        put(store, ("b", "secret"), limits=QuotaConfig(max_facts_per_user=1))
    with pytest.raises(QuotaError, match="max_store_bytes"):
        put(store, ("b", "secret"), limits=QuotaConfig(max_store_bytes=10))
    with pytest.raises(ConfigError, match="twice"):
        put(store, ("b", "x"), ("b", "y"))
    with pytest.raises(ConfigError, match="8192"):
        put(store, ("b", "x" * 8193))
    assert texts_of(store) == {"a": "x"}


def test_another_embedder_embeds_everything_anew(store):
    put(store, ("a", "x"), embedder="old")
    put(store, ("b", "y"), embedder="new")
    memory = store.read_user("ana")
    assert memory.embedder == "new"
    assert np.array_equal(memory.embeddings, embed(["x", "y"]))


def test_sources_and_the_api_respect_each_other(store):
    put(store, ("m1", "one"), ("m2", "two"), ("m3", "three"), origin="mem0")
    put(store, ("m2", "mine now"), ("a", "api"))
    again = put(store, ("m1", "one!"), ("m2", "two!"), ("a", "theirs"), origin="mem0")
    assert (again.updated, again.unchanged) == (("m1",), ("m2", "a"))
    assert living.delete_facts(store, "ana", ["a"], origin="mem0").missing == ("a",)
    living.delete_facts(store, "ana", ["m1", "m2"])
    assert put(store, ("m1", "one"), ("m2", "two"), origin="mem0").unchanged == ("m1", "m2")
    assert put(store, ("m1", "again")).created == ("m1",), "a person may bring it back"
    living.delete_facts(store, "ana", ["m3"], origin="mem0")
    assert put(store, ("m3", "three"), origin="mem0").created == ("m3",), "the source's own change"
    stones = store.read_user("ana").tombstones
    assert {(stone.kind, stone.origin) for stone in stones} == {("fact", "mem0")}


def test_segments_of_an_old_version(store, kit):
    read = kit.filled(store, which=[0])
    put(store, ("f2", "corrected"), ("n", "new"))
    reader = dataclasses.replace(kit.segment(3), context_fact_ids=("f2",))
    fresh = [kit.segment(1), kit.segment(2), reader]
    now, dropped = living.add_segments(store, read, {FP: fresh})
    assert dropped == 2
    assert set(now.encodings[FP]) == {"f0", "f1"}
    assert set(texts_of(store)) == {"f0", "f1", "f2", "f3", "n"}
    store.remove_user("ana")
    assert living.add_segments(store, read, {FP: fresh}) == (None, 3)
    assert store.read_user("ana") is None


def test_erased_user(store, kit):
    kit.filled(store)
    assert living.verify_erased(store, "ana")
    receipt = living.erase_user(store, "ana")
    assert receipt.files == len(receipt.digests) == 5
    assert living.verify_erased(store, "ana") == []
    assert store.read_user("ana") is None


def test_an_erased_user_does_not_come_back_to_an_epoch_of_before(store, first_epoch, monkeypatch):
    monkeypatch.setattr(writer, "first_epoch", first_epoch)
    before = put(store, ("a", "x")).epoch
    living.erase_user(store, "ana")
    assert put(store, ("a", "x")).epoch != before


def test_a_store_of_version_1_is_upgraded_by_the_next_write(store, kit, folder_of):
    kit.filled(store)
    marker = Path(store.url, m.MARKER)
    marker.write_bytes(marker.read_bytes().replace(b'"version":2', b'"version":1'))
    path = folder_of("ana") / "manifest.json"
    record = m.unseal(path.read_bytes(), m.Manifest, "m")
    body = record.model_dump(mode="python")
    del body["epoch"], body["tombstones"]
    [table] = [folder_of("ana") / ref.name for ref in record.facts]
    columns = ["id", "text", "turn_id", "time", "embedding"]
    data = tables._to_bytes(pq.read_table(table, columns=columns))
    table.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    name = f"facts-{digest[:32]}.parquet"
    table.rename(table.with_name(name))
    body["facts"] = {"name": name, "sha256": digest, "bytes": len(data), "rows": 4}
    body["sha256"] = hashlib.sha256(m._canonical(body)).hexdigest()
    path.write_bytes(m._canonical(body))

    old = Store.open(store.url)
    memory = old.read_user("ana")
    assert (len(memory.facts), memory.epoch, len(memory.encodings[FP])) == (4, 0, 4)
    assert old.verify() == []
    assert b'"version":1' in marker.read_bytes(), "reading changes nothing"
    assert put(old, ("n", "new")).version == 2
    assert b'"version":2' in marker.read_bytes()
    again = Store.open(store.url)
    assert texts_of(again).keys() == {"f0", "f1", "f2", "f3", "n"}
    assert again.verify() == []


def _writer(url, name, count):
    store = Store.open(url)
    for n in range(count):
        put(store, (f"{name}-{n}", f"text {n} of {name}"))
        if n % 3 == 2:
            living.delete_facts(store, "ana", [f"{name}-{n - 1}"])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_never_lose_an_update(store, kit):
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_writer, args=(store.url, f"w{n}", 12)) for n in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    kept = [n for n in range(12) if n % 3 != 1]
    assert texts_of(store).keys() == {f"w{w}-{n}" for w in range(3) for n in kept}
    assert kit.version(store, "ana") == 3 * (12 + 4)
    assert store.verify() == []


def _endless(url, pipe):
    store = Store.open(url)
    n = 0
    while True:
        put(store, (f"a{n}", f"text {n}"))
        os.write(pipe, f"a{n}\n".encode())
        n += 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_acknowledged_writes_survive_a_kill(store):
    read, write = os.pipe()
    context = multiprocessing.get_context("fork")
    job = context.Process(target=_endless, args=(store.url, write))
    job.start()
    os.close(write)
    with os.fdopen(read) as stream:
        told = [stream.readline().strip() for _ in range(5)]
        os.kill(job.pid, signal.SIGKILL)
        told += [line.strip() for line in stream]
    job.join()
    assert set(told) <= texts_of(Store.open(store.url)).keys()
    assert store.verify() == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("what", ["put", "delete"])
def test_a_kill_at_any_operation_keeps_what_was_acknowledged(store, kit, what):
    kit.filled(store)
    put(store, ("a", "acknowledged"))
    for n in range(100):
        copy = Path(store.url).with_name(f"copy{n}")
        shutil.copytree(store.url, copy)
        other = Store.open(str(copy))
        pid = os.fork()
        if pid == 0:
            left = [n]

            def step(name, left=left):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)

            files.on_step = step
            if what == "put":
                put(other, ("f1", "corrected"), ("b", "new"))
            else:
                living.delete_facts(other, "ana", ["f0"])
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found = texts_of(other)
        assert found["a"] == "acknowledged"
        assert other.verify() == []
        changed = kit.version(other, "ana") == 3
        if what == "put":
            assert (found["f1"] == "corrected") == ("b" in found) == changed
        else:
            assert ("f0" not in found) == changed
        if code == 0:
            assert changed
            assert n > 5
            return
    raise AssertionError("the write never completed")


@settings(max_examples=15, stateful_step_count=12, deadline=None)
class AnyOrder(RuleBasedStateMachine):
    """Writes, deletions and encodings in any order, against a model in plain dictionaries."""

    ids = st.sampled_from([f"i{n}" for n in range(6)])
    texts = st.sampled_from(["red", "green", "blue"])

    @initialize()
    def begin(self):
        self.folder = tempfile.mkdtemp()
        self.store = Store.open(f"{self.folder}/s", create=True)
        self.facts: dict[str, str] = {}
        self.mine: set[str] = set()
        self.hidden: set[str] = set()
        self.epoch = 0

    def teardown(self):
        shutil.rmtree(self.folder)

    def _move(self, new):
        self.epoch += any(new.get(i) != text for i, text in self.facts.items())
        self.facts = new

    @rule(writes=st.dictionaries(ids, texts, min_size=1, max_size=3))
    def write(self, writes):
        put(self.store, *writes.items())
        for i, text in writes.items():
            if self.facts.get(i) != text:
                if i in self.facts and i not in self.mine:
                    self.hidden.add(i)
                self.mine.add(i)
        self._move({**self.facts, **writes})

    @rule(which=st.sets(ids, min_size=1, max_size=3))
    def delete(self, which):
        living.delete_facts(self.store, "ana", sorted(which))
        self.hidden |= {i for i in which & self.facts.keys() if i not in self.mine}
        self.mine -= which
        self._move({i: text for i, text in self.facts.items() if i not in which})

    @rule(given=st.dictionaries(ids, texts, max_size=6))
    def encode(self, given):
        old = self.store.read_user("ana")
        facts = tuple(Fact(i, text) for i, text in given.items())
        merged, _ = merge_memory("ana", old, facts, (), "mini")
        rows = embed([fact.text for fact in merged.facts])
        memory = dataclasses.replace(merged, embeddings=rows)
        missing = [f for f in memory.facts if f.id not in memory.encodings.get(FP, {})]
        new = [
            NewSegment(
                fact.id,
                fact.text,
                tuple(fact.text.encode()),
                tuple(f.id for f in memory.facts if f.id != fact.id)[:2],
                (),
                torch.full((len(fact.text), 1, 2, 1, 2), float(len(fact.text))),
            )
            for fact in missing
        ]
        self.store.commit_user(memory, {FP: new})
        self.hidden |= {i for i in given if i in self.mine}
        self.hidden &= given.keys()
        mine = {i: text for i, text in self.facts.items() if i in self.mine}
        theirs = {i: text for i, text in given.items() if i not in self.hidden}
        self._move({**theirs, **mine})

    @invariant()
    def holds(self):
        memory = Store.open(self.store.url).read_user("ana")
        assert {f.id: f.text for f in memory.facts} == self.facts if memory else not self.facts
        if memory is None:
            return
        assert memory.epoch == self.epoch
        assert np.array_equal(memory.embeddings, embed([f.text for f in memory.facts])) or (
            not memory.facts
        )
        for table in memory.encodings.values():
            for fact_id, segment in table.items():
                assert segment.key == self.facts[fact_id]
                assert {*segment.context_fact_ids} <= self.facts.keys()
        assert self.store.verify() == []
        assert self.store.stats().garbage_bytes == 0


TestAnyOrder = AnyOrder.TestCase
