"""What was forgotten is gone: from tables and bytes, and from the KV of whatever had read it.

A tiny random checkpoint with a real tokenizer, encoded by real vLLM under two context policies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from tests.integration.checkpoints import PLAIN_ROPE, SHAPE

from inferscale_runtime.config import EncodingConfig, RuntimeConfig
from inferscale_runtime.encode.input import read_inputs
from inferscale_runtime.encode.job import EncodeJob, ModelOptions
from inferscale_runtime.encode.status import EncodeStatus
from inferscale_runtime.encode.stop import StopSignal
from inferscale_runtime.store import living
from inferscale_runtime.store.records import Segment
from inferscale_runtime.store.store import Store

pytestmark = pytest.mark.vllm

POLICIES = ("neighbours:3", "turns:2")
CANARY = "Quokka keys of Ana are hidden under the zanzibar lantern"
TURN = "The Quokka key is under my zanzibar lantern, tell nobody"
OTHERS = (
    "Ana keeps the spare key of her car in a drawer",
    "Ana hides sweets under the bed",
    "Ana bought a lantern for the garden",
    "Ana plays the cello on Sundays",
    "Ana works at the harbour office",
    "Ana has two brothers in Lyon",
    "Ana grows tomatoes on the roof",
    "Ana lost the key of the harbour gate",
)
ALIKE = 0.9999
"""Cosine above which a row is taken for a copy, also a rounded one."""
SAME = 1 - 1e-7
"""The same for a fact that was encoded again: it reads its own tokens, so that most of a row stays.
Two encodings in the same context agree to about 1 - 1e-12."""


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers as hf

    path = tmp_path_factory.mktemp("erasure") / "model"
    tokenizer = hf.AutoTokenizer.from_pretrained(smollm2)
    tokenizer.save_pretrained(path)
    torch.manual_seed(7)
    shape = SHAPE | {"vocab_size": len(tokenizer)}
    config = hf.LlamaConfig(**shape, rope_parameters=PLAIN_ROPE)
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def write_input(path: Path) -> str:
    lines = []
    texts = [*OTHERS[:4], CANARY, *OTHERS[4:]]
    for n, text in enumerate(texts):
        name = "canary" if text == CANARY else str(n)
        said = TURN if text == CANARY else f"By the way, number {n}: {text.lower()}"
        lines.append({"kind": "turn", "user": "ana", "id": f"turn-{name}", "speaker": "Ana",
                      "text": said})  # fmt: skip
        lines.append({"kind": "fact", "user": "ana", "id": f"fact-{name}", "text": text,
                      "turn": f"turn-{name}"})  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def encode(model: Path, store: Path, policy: str, source: str | None) -> EncodeJob:
    config = RuntimeConfig(store=str(store), encoding=EncodingConfig(policy=policy))
    options = ModelOptions(str(model), dtype="float32", kv_cache_bytes=1 << 26)
    job = EncodeJob(config, options, EncodeStatus(), StopSignal())
    if source is None:
        job.run_pending((0, 1))
    else:
        job.run(read_inputs([source], max_bytes=1 << 20), source, (0, 1))
    return job


def decoded(store: Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, text and raw bytes of every file; of a table, every value of every column."""
    for path in sorted(p for p in store.rglob("*") if p.is_file()):
        data = path.read_bytes()
        text = data.decode("latin-1")
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            columns = [name for name in table.column_names if name != "embedding"]
            text += json.dumps(table.select(columns).to_pylist(), default=str)
        yield path.name, text, data


def rows_of(store: Store, segments: list[Segment]) -> torch.Tensor:
    """``[tokens, 2, layers - 1, heads * dim]``, unit length.

    Without the first layer, whose keys and values before rope are a function of the token alone.
    """
    found = store.read_segments("ana", segments)
    kv = torch.cat([part for part in found if isinstance(part, torch.Tensor)])
    assert len(kv) == sum(segment.num_tokens for segment in segments)
    flat = kv[:, 1:].transpose(1, 2).flatten(3).double()
    return flat / flat.norm(dim=-1, keepdim=True)


def nearest(old: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """For each old row its largest cosine with any row that is left, ``[tokens, 2, layers - 1]``.

    Keys are compared with keys and values with values, layer by layer.
    """
    return torch.einsum("tkld,skld->tskl", old, left).amax(dim=1)


def left_in(folder: Path, without: Sequence[str] = ()) -> torch.Tensor:
    store = Store.open(str(folder))
    memory = store.read_user("ana")
    assert memory is not None
    tables = memory.encodings.values()
    segments = [s for table in tables for s in table.values() if s.fact_id not in without]
    return rows_of(store, segments)


def test_nothing_of_a_forgotten_fact_and_turn_is_left(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    source = write_input(tmp_path / "in.jsonl")
    first = {policy: encode(model, folder, policy, source) for policy in POLICIES}
    store = Store.open(str(folder))
    before = store.read_user("ana")
    assert before is not None
    tables = {p: before.encodings[first[p].fingerprint.digest] for p in POLICIES}
    assert all(len(table) == len(OTHERS) + 1 for table in tables.values())
    dependents = {
        policy: sorted(
            i
            for i, s in table.items()
            if i != "fact-canary"
            and {"fact-canary", "turn-canary"} & {*s.context_fact_ids, *s.context_turn_ids}
        )
        for policy, table in tables.items()
    }
    assert all(dependents.values()), "or the test proves nothing"
    readers = sorted({*dependents[POLICIES[0]], *dependents[POLICIES[1]]})
    canaries = [table["fact-canary"] for table in tables.values()]
    # Rows before its first word of its own are those of any fact behind the same context.
    shared = max(
        len(commonprefix([s.token_ids, canaries[0].token_ids]))
        for i, s in tables[POLICIES[0]].items()
        if i != "fact-canary"
    )
    own = torch.cat([rows_of(store, [segment])[shared:] for segment in canaries])
    assert 0 < shared < len(own) // 2
    read = rows_of(store, [tables[policy][i] for policy in POLICIES for i in dependents[policy]])
    tokens = json.dumps(list(canaries[0].token_ids))
    secrets = ("fact-canary", "turn-canary", "Quokka", "zanzibar", canaries[0].key, tokens)

    def found() -> set[str]:
        return {s for s in secrets for _, text, _ in decoded(folder) if s in text}

    # The control: the search finds everything as long as it is there.
    assert found() == {*secrets}
    assert nearest(own, left_in(folder)).min() > SAME
    assert nearest(read, left_in(folder)).min() > SAME

    gone = living.delete_facts(store, "ana", ["fact-canary"])
    assert (gone.deleted, gone.epoch) == (("fact-canary",), before.epoch + 1)
    turns = living.delete_turns(store, "ana", ["turn-canary"])
    assert (turns.deleted, turns.epoch) == (("turn-canary",), before.epoch + 2)
    assert gone.invalidated + turns.invalidated == sum(map(len, dependents.values()))
    for policy in (None, *POLICIES):
        if policy is not None:
            again = encode(model, folder, policy, None)
            assert again.report.encoded == len(dependents[policy])
        assert found() == set()
        assert nearest(own, left_in(folder)).max() < ALIKE
        assert nearest(read, left_in(folder, without=readers)).max() < ALIKE
        assert nearest(read, left_in(folder)).max() < SAME
        assert store.verify() == []
    memory = store.read_user("ana")
    assert memory is not None
    assert all(len(table) == len(OTHERS) for table in memory.encodings.values())

    # The source still has both; they stay gone, and nothing is read again.
    assert encode(model, folder, POLICIES[1], source).report.encoded == 0
    assert found() == set()

    receipt = living.erase_user(store, "ana")
    assert receipt.files == len(receipt.digests) > 0
    assert living.verify_erased(store, "ana") == []
    assert not any("harbour" in text for _, text, _ in decoded(folder))
