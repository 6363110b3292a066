"""Bad arguments: one clear error before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferscale_runtime.bench.inject import place_tokens
from inferscale_runtime.bench.prefill import PrefillOptions, token_ids
from inferscale_runtime.bench.report import BenchError
from inferscale_runtime.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ttft", "--k", "5,x"], "write numbers as 5,10,50"),
        (["ttft", "--k", "50,5"], "in ascending order"),
        (["ttft", "--k", "0"], "must lie in 1..1000"),
        (["ttft", "--repeats", "0"], "must lie in 1..1000"),
        (["ttft", "--baseline", "other"], "invalid choice"),
        (["throughput", "--zipf", "-1"], "must lie in 0..10"),
        (["throughput", "--rate", "fast"], "is not a number"),
        (["throughput", "--k", "5,10"], "write one number"),
        (["session", "--turns", "1"], "must lie in 2..1000"),
        (["inject", "--tokens", ""], "write numbers as"),
        (["quality"], "required: --data"),
        ([], "required: BENCH"),
    ],
)
def test_refused_by_the_parser(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ttft", "--k", "20", "--facts", "10"], "--facts 10: fewer than k (20)"),
        (["throughput", "--concurrency", "200"], "--concurrency 200: more than --users 100"),
        (["throughput", "--modes", "both"], "--modes 'both'"),
        (["throughput", "--facts", "2"], "--facts 2: fewer than k (50)"),
        (["session", "--k", "61"], "--facts 60: fewer than k (61)"),
        (["encode", "--kept-tokens", "350"], "--kept-tokens 350"),
        (["inject", "--json", "/no/such/folder/a.json"], "does not exist"),
        (["ttft", "--plot", "curve.pdf"], "must end in .png"),
        (
            ["ttft", "--url", "http://localhost:1", "--", "--enforce-eager"],
            "--url: vLLM arguments",
        ),
        (["ttft", "--data", "/no/such/file"], "cannot be read"),
    ],
)
def test_refused_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("inferscale: error:")
    assert output.err.count("\n") == 1


def test_data_with_too_few_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turn = {"dia_id": "D1:1", "speaker": "A", "text": "Hello"}
    conversation = {
        "sample_id": "c1",
        "conversation": {"session_1": [turn], "session_1_date_time": "today"},
        "observation": {"session_1_observation": {"A": [["A said hello.", "D1:1"]]}},
        "qa": [{"question": "Who said hello?"}],
    }
    file = tmp_path / "data.json"
    file.write_text(json.dumps([conversation]))
    arguments = ["bench", "ttft", "--data", str(file), "--k", "1"]
    assert main([*arguments, "--users", "1", "--repeats", "2"]) == 2
    assert "has 1 questions for c1, 2 are needed" in capsys.readouterr().err
    assert main([*arguments, "--users", "2"]) == 2
    assert "--users 2" in capsys.readouterr().err


def test_tokens_are_placed_on_distinct_rows_and_slots() -> None:
    places = place_tokens(200, rows=500, num_blocks=10, block_size=32, seed=1)
    assert len(set(places.rows.tolist())) == len(set(places.slots.tolist())) == 200
    assert places.positions.tolist() == list(range(200))
    assert int(places.slots.min()) >= 32, "the null block is left alone"
    assert int(places.rows.max()) < 500
    with pytest.raises(BenchError, match="the cache holds 288"):
        place_tokens(289, rows=1000, num_blocks=10, block_size=32, seed=1)


def test_no_pass_reads_the_tokens_of_another() -> None:
    options = PrefillOptions("m", "float32", 3, 20, 5, 1, 1 << 30, seed=1)
    first, second = token_ids(options, 0), token_ids(options, 1)
    assert [len(ids) for ids in first] == [20, 20, 20]
    assert len({*first, *second}) == 6
    assert token_ids(options, 0) == first
