"""From a server's ``/metrics`` to its load: the few series that count, found by their aliases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from inferscale_operator.desired.autoscaling import KV_CACHE, RUNNING, TTFT, WAITING
from inferscale_operator.planner.load import ALIASES, Buckets, PodLoad


@dataclass(frozen=True, slots=True)
class Sample:
    """What one page said.

    Attributes:
        values: Sum over all series of each signal.
        buckets: Times to first token since the server started, by upper bound.
        names: Metric name of each signal that is there.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    buckets: Buckets = ()
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def first_tokens(self) -> float:
        """How many first tokens there were since the server started."""
        return self.buckets[-1][1] if self.buckets else 0.0


def read_page(text: str) -> Sample:
    """Reads a page in Prometheus' text format.

    A page holds thousands of lines; only those of the signals are parsed.

    Raises:
        ValueError: It is no such page.
    """
    values: dict[str, float] = {}
    buckets: dict[float, float] = {}
    names: dict[str, str] = {}
    series = _by_metric(text)
    for signal, aliases in ALIASES.items():
        name = next((alias for alias in aliases if alias in series), None)
        if name is None:
            continue
        names[signal] = name
        for labels, value in series[name]:
            if signal != TTFT:
                values[signal] = values.get(signal, 0.0) + value
            elif "le" in labels:
                bound = float(labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + value
    return Sample(values, tuple(sorted(buckets.items())), names)


def load_of(samples: list[tuple[float, Sample]], now: float) -> PodLoad:
    """Load of a pod.

    Args:
        samples: (time, page) of the looks of the last minutes, the oldest first; at least one.
        now: Time, on the same clock.
    """
    at, last = samples[-1]
    earlier = samples[-2][1] if len(samples) > 1 else None
    return PodLoad(
        age_seconds=now - at,
        running=last.values.get(RUNNING, 0.0),
        waiting=last.values.get(WAITING, 0.0),
        kv_cache=last.values.get(KV_CACHE, 0.0),
        first_tokens=_difference(last, samples[0][1]) if earlier else (),
        answered=None if earlier is None else _grown(last.first_tokens, earlier.first_tokens),
        names=last.names,
    )


def _difference(last: Sample, first: Sample) -> Buckets:
    if last.first_tokens < first.first_tokens:
        first = Sample()  # the server was started again in between
    before = dict(first.buckets)
    return tuple((bound, count - before.get(bound, 0.0)) for bound, count in last.buckets)


def _grown(last: float, earlier: float) -> float:
    return last - earlier if last >= earlier else last


_WANTED = tuple(name for aliases in ALIASES.values() for name in aliases)


def _by_metric(text: str) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    wanted = "\n".join(_wanted_lines(text))
    for family in text_string_to_metric_families(wanted + "\n" if wanted else ""):
        for sample in family.samples:
            name = sample.name.removesuffix("_bucket")
            found.setdefault(name, []).append((sample.labels, float(sample.value)))
    return found


def _wanted_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name.removesuffix("_bucket") in _WANTED:
            yield line
