"""Erasing a whole store, and measuring one by its listing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from inferscale_runtime import cli
from inferscale_runtime.errors import StoreFormatError, StoreUnwritableError
from inferscale_runtime.store import files as files_module
from inferscale_runtime.store.erase import erase_store
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.store import Store


def fill(store, kit):
    for user in ("ana", "bob", "eve"):
        kit.filled(store, user)
    store.write_preamble(kit.FP, {"policy": "none"}, [1, 2], kit.kv(9, 2))


def sizes(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): path.stat().st_size
        for path in root.rglob("*")
        if path.is_file()
    }


def test_every_file_goes_and_the_receipt_names_them(store, kit, tmp_path, capsys):
    fill(store, kit)
    root = Path(store.url)
    before = sizes(root)
    receipt = tmp_path / "receipt.json"
    receipt.write_text("old text that is longer than the receipt" * 20)
    assert cli.main(["store", "erase", store.url, "--yes", "--json", str(receipt)]) == 0
    assert list(root.iterdir()) == []
    names = "".join(f"{name}\n" for name in sorted(before))
    assert json.loads(receipt.read_text()) == {
        "files": len(before),
        "bytes": sum(before.values()),
        "names_sha256": hashlib.sha256(names.encode()).hexdigest(),
    }
    assert f"erased {len(before)} files" in capsys.readouterr().out


def test_nothing_there_is_no_error(tmp_path):
    for _ in range(2):
        assert cli.main(["store", "erase", str(tmp_path / "none"), "--yes"]) == 0
    (tmp_path / "empty").mkdir()
    assert cli.main(["store", "erase", str(tmp_path / "empty"), "--yes"]) == 0


def test_confirmation_is_asked_for(store, kit, capsys):
    fill(store, kit)
    before = sizes(Path(store.url))
    assert cli.main(["store", "erase", store.url]) == 2
    assert "--yes" in capsys.readouterr().err
    assert sizes(Path(store.url)) == before


@pytest.mark.parametrize(
    "foreign",
    [
        "notes.txt",
        "users/notes.txt",
        "users/0123/manifest.json",
        "preambles/deep/x.json",
        "users/0123456789abcdef0123456789abcdef/photo.png",
        "users/0123456789abcdef0123456789abcdef/deep/manifest.json",
        ".ssh/id",
    ],
)
def test_other_things_are_named_and_nothing_goes(store, kit, foreign):
    fill(store, kit)
    path = Path(store.url) / foreign
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = sizes(Path(store.url))
    with pytest.raises(StoreFormatError) as caught:
        Store.erase(store.url)
    assert f"'{foreign}'" in str(caught.value)
    assert sizes(Path(store.url)) == before


def test_a_folder_without_the_marker_is_no_store(store, kit):
    fill(store, kit)
    (Path(store.url) / "inferscale-store.json").unlink()
    before = sizes(Path(store.url))
    with pytest.raises(StoreFormatError, match=r"inferscale-store\.json"):
        Store.erase(store.url)
    assert sizes(Path(store.url)) == before


def test_leftovers_of_killed_writers_and_the_volume_s_own_folder(store, kit):
    fill(store, kit)
    root = Path(store.url)
    (root / f".tmp-{'a' * 32}").write_text("half")
    (next((root / "users").iterdir()) / f".tmp-{'b' * 32}").write_text("half")
    (root / "lost+found").mkdir()
    Store.erase(store.url)
    assert [path.name for path in root.iterdir()] == ["lost+found"]


def test_interrupted_at_every_step_it_goes_on(store, kit, monkeypatch):
    """Whatever is left is still a store, and a second call ends with nothing."""

    class Killed(BaseException):
        pass

    after = 0
    while True:
        fill(Store.open(store.url, create=True), kit) if not sizes(Path(store.url)) else None
        steps = 0

        def step(name: str, limit: int = after) -> None:
            nonlocal steps
            steps += 1
            if steps > limit:
                raise Killed

        monkeypatch.setattr(files_module, "on_step", step)
        try:
            Store.erase(store.url)
        except Killed:
            monkeypatch.setattr(files_module, "on_step", lambda name: None)
            left = sizes(Path(store.url))
            assert not left or "inferscale-store.json" in left
            receipt = Store.erase(store.url)
            assert receipt.files == len(left)
            assert sizes(Path(store.url)) == {}
            after += 1
            continue
        break
    assert after > 10, "it was interrupted in the middle, too"


def test_a_writer_that_goes_on_is_an_error(store, kit, monkeypatch):
    fill(store, kit)
    files = StoreFiles(store.url)
    remove_all = files.remove_all

    def and_write(names):
        remove_all(names)
        monkeypatch.setattr(files, "remove_all", remove_all)
        kit.filled(Store.open(store.url), f"user{len(names)}")
        monkeypatch.setattr(files, "remove_all", and_write)

    monkeypatch.setattr(files, "remove_all", and_write)
    with pytest.raises(StoreUnwritableError, match="Stop its encoding jobs"):
        erase_store(files)
    monkeypatch.setattr(files, "remove_all", remove_all)
    erase_store(files)
    assert sizes(Path(store.url)) == {}


def test_object_storage(kit):
    url = "memory://inferscale-erase"
    store = Store.open(url, create=True)
    fill(store, kit)
    stats = store.stats()
    assert store.total_bytes() == stats.bytes
    receipt = Store.erase(url)
    assert receipt.bytes == stats.bytes
    assert StoreFiles(url).find() == {}
    assert Store.erase(url).files == 0


def test_an_unreadable_folder_is_an_error_not_an_empty_one(store, kit, monkeypatch):
    fill(store, kit)

    def walk(root, onerror):
        onerror(PermissionError(13, "Permission denied", root))
        yield from ()

    monkeypatch.setattr(files_module.os, "walk", walk)
    with pytest.raises(StoreUnwritableError, match="Permission denied"):
        Store.erase(store.url)


def test_shards_add_up_to_the_store(store, kit):
    fill(store, kit)
    whole = sum(sizes(Path(store.url)).values())
    assert store.total_bytes() == whole
    parts = [store.total_bytes(i, 4) for i in range(4)]
    assert sum(parts) == whole
    assert len([part for part in parts if part]) > 1


def test_a_user_s_bytes_lie_in_its_own_shard(store, kit):
    from inferscale_runtime.encode.job import in_shard

    empty = [store.total_bytes(i, 4) for i in range(4)]
    kit.filled(store, "ana")
    grown = [i for i in range(4) if store.total_bytes(i, 4) > empty[i]]
    assert grown == [i for i in range(4) if in_shard("ana", i, 4)]
