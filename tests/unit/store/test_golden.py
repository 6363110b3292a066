"""Bytes that must never change within version 2 of the format, and those of version 1."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from inferscale_runtime.store import manifest
from inferscale_runtime.store.manifest import FileRef, Manifest


def test_kv_file(store, kit, folder_of):
    kv = torch.arange(2 * 2 * 2 * 1 * 4, dtype=torch.float32).reshape(2, 2, 2, 1, 4)
    segment = kit.segment(0)
    object.__setattr__(segment, "kv", kv)
    done = store.commit_user(kit.memory(), {kit.FP: [segment]})
    path = folder_of("ana") / done.encodings[kit.FP]["f0"].file
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "a50aeffe159623fce0e5fa60a4cc3369b8d34fa670b4e8ad35679b2c5817f982"
    assert path.name == f"kv-{digest[:32]}.safetensors"
    assert path.read_bytes() == save({"kv": kv})
    assert torch.equal(load_file(path)["kv"], kv)
    assert done.encodings[kit.FP]["f0"].crc32 == 0xBB6524E8


def ref(name):
    return FileRef(name=name, sha256="0" * 64, bytes=7, rows=1)


ENTRY = '{"bytes":7,"name":"%s","rows":1,"sha256":"' + "0" * 64 + '"}'


def test_manifest():
    record = Manifest(
        user="zoë",
        version=3,
        epoch=2,
        embedder="mini",
        facts=(ref("facts-0.parquet"), ref("facts-1.parquet")),
        turns=ref("turns-0.parquet"),
        tombstones=ref("tombstones-0.parquet"),
        encodings={"ab" * 32: ref("index-0.parquet")},
        kv=(ref("kv-0.safetensors"),),
    )
    data = manifest.seal(record)
    assert manifest.unseal(data, Manifest, "m") == record
    assert data.decode() == (
        '{"embedder":"mini","encodings":{"' + "ab" * 32 + '":' + ENTRY % "index-0.parquet" + "},"
        '"epoch":2,'
        '"facts":[' + ENTRY % "facts-0.parquet" + "," + ENTRY % "facts-1.parquet" + "],"
        '"kv":[' + ENTRY % "kv-0.safetensors" + "],"
        '"sha256":"b3f3cc3d4a5d0a238da76a85f8ca0c37f3fe89653738207360a20fca75a82e53",'
        '"tombstones":' + ENTRY % "tombstones-0.parquet" + ","
        '"turns":' + ENTRY % "turns-0.parquet" + ',"user":"zoë","version":3}'
    )


def test_manifest_of_version_1():
    data = (
        '{"embedder":"mini","encodings":{"' + "ab" * 32 + '":' + ENTRY % "index-0.parquet" + "},"
        '"facts":' + ENTRY % "facts-0.parquet" + ',"kv":[' + ENTRY % "kv-0.safetensors" + "],"
        '"sha256":"bd924a4ee7ae103c8020045af856925c4c715586425d78785dd21a8bf0c50a2a",'
        '"turns":' + ENTRY % "turns-0.parquet" + ',"user":"zoë","version":3}'
    )
    found = manifest.unseal(data.encode(), Manifest, "m")
    assert (found.epoch, found.facts, found.tombstones) == (0, (ref("facts-0.parquet"),), None)
    assert (found.version, found.user) == (3, "zoë")


def test_marker_and_folder(store, kit):
    kit.filled(store, "ana")
    marker = Path(store.url, "inferscale-store.json").read_bytes()
    assert marker == b'{"format":"inferscale-store","version":2}'
    names = [p.name for p in Path(store.url, "users").iterdir()]
    assert names == ["24d4b96f58da6d4a8512313bbd02a28e"]
