"""The command ``inferscale store``: list, show, verify and erase."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.store.store import Receipt, Store, UserReceipt


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``store`` and its commands; each sets ``func(args) -> exit code``."""
    parser = subparsers.add_parser("store", help="look into, check and erase stored memories")
    commands = parser.add_subparsers(dest="store_command", required=True, metavar="COMMAND")

    ls = commands.add_parser("ls", help="list users, sizes and fingerprints")
    show = commands.add_parser("show", help="show one user without the text of the facts")
    verify = commands.add_parser("verify", help="check every checksum; exit 1 on damage")
    remove = commands.add_parser("rm-user", help="erase every file of one user")
    erase = commands.add_parser("erase", help="erase every file of the store")
    for command in (ls, show, verify, remove, erase):
        command.add_argument("store", metavar="STORE", help="folder or URL of the store")
    for command in (show, remove):
        command.add_argument("user", metavar="USER", help="user id")
    for command in (ls, show):
        command.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument("--facts", action="store_true", help="print the text of the facts too")
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--user", metavar="U", help="check this user only")
    which.add_argument(
        "--erased", metavar="U", help="check that nothing of this user is left; exit 1 if it is"
    )
    for command in (remove, erase):
        command.add_argument(
            "--yes", action="store_true", help="confirm; nothing is erased without"
        )
        command.add_argument("--json", metavar="FILE", help="write the receipt to this file")
    erase.set_defaults(func=_erase)
    ls.set_defaults(func=_ls)
    show.set_defaults(func=_show)
    verify.set_defaults(func=_verify)
    remove.set_defaults(func=_remove)


def _segments(counts: dict[str, int]) -> str:
    return " ".join(f"{name[:16]}={count}" for name, count in counts.items()) or "-"


def _ls(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    users, totals = list(store.user_stats()), store.stats()
    dtypes = store.kv_dtypes()
    if args.json:
        body = {**asdict(totals), "users": [asdict(user) for user in users], "kv_dtypes": dtypes}
        print(json.dumps({**body, "fingerprints": store.fingerprints()}, indent=2))
        return 0
    for user in users:
        print(
            f"{user.user}\tversion {user.version}\tfacts {user.facts}\tturns {user.turns}\t"
            f"bytes {user.bytes}\tsegments {_segments(user.segments)}"
        )
    print(
        f"{totals.users} users, {totals.facts} facts, {totals.bytes} bytes "
        f"({totals.garbage_bytes} unused), preambles: {' '.join(store.fingerprints()) or '-'}"
    )
    for name, dtype in dtypes.items():
        print(f"fingerprint {name}: kv {dtype}")
    for path in totals.damaged:
        print(f"damaged: {path}")
    return 0


def _show(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    memory = store.read_user(args.user)
    if memory is None:
        raise ConfigError(f"store '{args.store}' has no user '{args.user}'")
    segments = {name: len(table) for name, table in memory.encodings.items()}
    body: dict[str, Any] = {
        "user": memory.user,
        "version": memory.version,
        "facts": len(memory.facts),
        "turns": len(memory.turns),
        "embedder": memory.embedder,
        "embedding_dim": memory.embeddings.shape[1],
        "segments": segments,
        "tokens": {
            name: sum(segment.num_tokens for segment in table.values())
            for name, table in memory.encodings.items()
        },
    }
    if args.facts:
        body["fact_list"] = [asdict(fact) for fact in memory.facts]
    if args.json:
        print(json.dumps(body, indent=2, ensure_ascii=False))
        return 0
    for name in ("user", "version", "facts", "turns", "embedder", "embedding_dim"):
        print(f"{name}: {body[name]}")
    for name, count in segments.items():
        print(f"fingerprint {name}: {count} segments, {body['tokens'][name]} tokens")
    if args.facts:
        for fact in memory.facts:
            print(f"{fact.id}\t{fact.text}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    if args.erased is not None:
        left = Store.open(args.store).leftovers(args.erased)
        for path in left:
            print(f"left: {path}")
        print(f"{len(left)} files and folders are left" if left else "nothing is left")
        return 1 if left else 0
    problems = Store.open(args.store).verify(args.user)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else "no problems")
    return 1 if problems else 0


def _remove(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    if not args.yes:
        raise ConfigError(f"this erases user '{args.user}' for good. Add --yes to confirm")
    receipt = store.remove_user(args.user)
    if not receipt.files:
        raise ConfigError(f"store '{args.store}' has no user '{args.user}'")
    print(f"erased {receipt.files} files, {receipt.bytes} bytes of {receipt.folder}")
    for name, digest in receipt.digests.items():
        print(f"{digest or 'unreadable'}  {name}")
    if args.json:
        _write_receipt(args.json, receipt)
    return 0


def _write_receipt(path: str, receipt: Receipt | UserReceipt) -> None:
    try:
        # In place: a pod's termination log cannot be replaced.
        Path(path).write_text(json.dumps(asdict(receipt)) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--json '{path}': {error.strerror}; it is erased, the receipt is above"
        ) from error


def _erase(args: argparse.Namespace) -> int:
    if not args.yes:
        raise ConfigError(
            f"this erases the whole store '{args.store}' for good. Add --yes to confirm"
        )
    receipt = Store.erase(args.store)
    print(
        f"erased {receipt.files} files, {receipt.bytes} bytes, "
        f"sha256 of their names {receipt.names_sha256}"
    )
    if args.json:
        _write_receipt(args.json, receipt)
    return 0
