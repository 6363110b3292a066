"""Load from the text that servers show."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

import pytest

from inferscale_operator.handlers.exposition import Sample, load_of, read_page
from inferscale_operator.planner.load import ALIASES

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:KV vllm:kv_cache_usage_perc is a word of a comment
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 6.0
vllm:time_to_first_token_seconds_count{engine="0"} 6.0
vllm:time_to_first_token_seconds_sum{engine="0"} 9.0
vllm:time_to_first_token_seconds_created{engine="0"} 1.7e9
process_open_fds 20.0
"""


def test_series_of_all_engines_are_added_and_others_left_alone() -> None:
    page = PAGE.replace("vllm:KV vllm:kv_cache_usage_perc is a word of a comment\n", "")
    sample = read_page(page)
    assert sample.values == {"running": 4.0, "waiting": 2.0, "kvCache": 0.25}
    assert sample.buckets == ((0.5, 4.0), (math.inf, 6.0))
    assert sample.names == {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kvCache": "vllm:kv_cache_usage_perc",
        "ttft": "vllm:time_to_first_token_seconds",
    }


def test_an_older_name_is_found() -> None:
    sample = read_page('vllm:gpu_cache_usage_perc{engine="0"} 0.5\n')
    assert sample.names == {"kvCache": "vllm:gpu_cache_usage_perc"}
    assert sample.values == {"kvCache": 0.5}


@pytest.mark.parametrize("text", ["", "<html>", '{"a": 1}', "# TYPE x gauge\nx 1\n"])
def test_other_pages_have_no_signal(text: str) -> None:
    assert read_page(text) == Sample()


@pytest.mark.parametrize("text", ["vllm:num_requests_running{ 3", "vllm:num_requests_running x\n"])
def test_a_broken_page_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_page(text)


def page(below: float, total: float) -> Sample:
    return Sample(buckets=((0.5, below), (math.inf, total)))


def test_first_tokens_are_those_of_the_window() -> None:
    first = load_of([(0.0, page(4, 6))], 1.0)
    assert (first.age_seconds, first.first_tokens, first.answered) == (1.0, (), None)
    later = load_of([(0.0, page(4, 6)), (10.0, page(5, 9)), (20.0, page(5, 10))], 20.0)
    assert later.first_tokens == ((0.5, 1.0), (math.inf, 4.0))
    assert later.answered == 1.0


def test_counters_that_begin_anew_are_not_negative() -> None:
    load = load_of([(0.0, page(4, 6)), (10.0, page(1, 2))], 10.0)
    assert load.first_tokens == ((0.5, 1.0), (math.inf, 2.0))
    assert load.answered == 2.0


def test_the_newest_names_are_those_of_the_vllm_in_use() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed: its metric names were not compared")
    file = Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py"
    names = set(re.findall(r'"(vllm:\w+)"', file.read_text(encoding="utf-8")))
    assert {aliases[0] for aliases in ALIASES.values()} <= names
