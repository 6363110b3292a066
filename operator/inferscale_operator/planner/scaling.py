"""How many replicas a model should have: one pure function of time, load, limits and memory.

Up at once, down slowly: a wish for fewer replicas has to last, and the most that was wished for
meanwhile is what stays. Old figures change nothing. What is remembered lies in the status, so an
operator that starts anew goes on where the last one stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from inferscale_operator.planner.load import Load

_MOST_GROWTH = 2
"""By growth, or by slow first tokens, the size at most doubles in one step."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Limits and targets.

    Attributes:
        minimum: Fewest replicas while awake, at least 1.
        maximum: Most replicas.
        requests: Running and waiting requests that a replica should carry.
        kv_cache: Used part of its KV cache, 0 to 1; None when it does not matter.
        ttft_seconds: 95th percentile of the time to first token; None when it does not matter.
        tolerance: Part of a target by which a difference changes nothing.
        up_seconds: How long more must have been wished for.
        down_seconds: How long fewer must have been wished for.
        idle_seconds: How long without requests before the size becomes 0; None for never.
        cold_start_seconds: Time from a new replica to its first answer.
        follows_load: Whether the size is decided here; else only sleeping and waking is.
        sleeps_from: Largest size that may become 0; None for every size.
        wakes_in_last_size: Whether a model wakes in the size in which it fell asleep.
    """

    minimum: int = 1
    maximum: int = 4
    requests: int = 8
    kv_cache: float | None = None
    ttft_seconds: float | None = None
    tolerance: float = 0.1
    up_seconds: float = 0.0
    down_seconds: float = 300.0
    idle_seconds: float | None = None
    cold_start_seconds: float = 0.0
    follows_load: bool = True
    sleeps_from: int | None = None
    wakes_in_last_size: bool = False


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What is remembered between two looks; see ``status.autoscaling``."""

    up_since: datetime | None = None
    up_to: int | None = None
    down_since: datetime | None = None
    down_to: int | None = None
    idle_since: datetime | None = None
    awake_replicas: int | None = None
    """Size in which the model fell asleep; None while it is awake."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A size, what to remember, and why.

    Attributes:
        replicas: The size to have now.
        state: To be given to the next decision.
        reason: Why the size changes; empty when it does not.
        next_seconds: After which time alone the decision may be another; None for never.
    """

    replicas: int
    state: ScalingState
    reason: str = ""
    next_seconds: float | None = None


def decide_scaling(
    now: datetime,
    replicas: int,
    settings: ScalingSettings,
    load: Load,
    state: ScalingState,
    *,
    settled: bool = True,
) -> ScalingDecision:
    """Decides.

    Args:
        now: Time, UTC.
        replicas: The size that is asked for now, whoever asked for it.
        settings: Limits and targets.
        load: Of all ready pods.
        state: From the decision before.
        settled: Whether no rollout is under way; only then replicas are taken away.
    """
    if replicas == 0:
        return _asleep(settings, load, state)
    woken = state.awake_replicas
    state = replace(state, awake_replicas=None)
    if woken is not None and settings.wakes_in_last_size and woken > replicas:
        return ScalingDecision(woken, ScalingState(), "awake again in its last size")
    if settings.follows_load and not settings.minimum <= replicas <= settings.maximum:
        bound = min(max(replicas, settings.minimum), settings.maximum)
        name = "minReplicas" if bound > replicas else "maxReplicas"
        if bound > replicas or settled:
            return ScalingDecision(bound, ScalingState(), f"{name} is {bound}")
    if not load.fresh:
        return ScalingDecision(replicas, ScalingState())
    sleep = _sleep(now, replicas, settings, load, state, settled=settled)
    if sleep.replicas == 0 or not settings.follows_load:
        return sleep
    follow = _follow(now, replicas, settings, load, sleep.state, settled=settled)
    times = [item.next_seconds for item in (sleep, follow) if item.next_seconds is not None]
    return replace(follow, next_seconds=min(times, default=None))


def _asleep(settings: ScalingSettings, load: Load, state: ScalingState) -> ScalingDecision:
    """Size 0: the activator wakes the model; this is for when it could not."""
    last = state.awake_replicas
    kept = ScalingState(awake_replicas=last)
    if settings.idle_seconds is None:
        if last is not None:
            # Put to sleep by a spec that holds no more. A person's own 0 stays.
            return ScalingDecision(last, ScalingState(), "it may not sleep any more")
        return ScalingDecision(0, kept)
    if load.held > 0:
        size = last if last is not None and settings.wakes_in_last_size else settings.minimum
        return ScalingDecision(size, ScalingState(), f"{load.held} requests wait")
    return ScalingDecision(0, kept)


def _sleep(
    now: datetime,
    replicas: int,
    settings: ScalingSettings,
    load: Load,
    state: ScalingState,
    *,
    settled: bool,
) -> ScalingDecision:
    # Not known whether anybody asked counts as asked: a restart costs one more waiting time.
    in_use = load.ready == 0 or load.requests > 0 or load.held > 0 or load.answered != 0
    if settings.idle_seconds is None or in_use:
        return ScalingDecision(replicas, replace(state, idle_since=None))
    since = state.idle_since or now
    state = replace(state, idle_since=since)
    left = settings.idle_seconds - (now - since).total_seconds()
    if left > 0:
        return ScalingDecision(replicas, state, next_seconds=left)
    small = settings.sleeps_from is None or replicas <= settings.sleeps_from
    if not settled or not small:
        return ScalingDecision(replicas, state)
    reason = f"no request for {settings.idle_seconds:.0f} s"
    return ScalingDecision(0, ScalingState(awake_replicas=replicas), reason)


def _follow(
    now: datetime,
    replicas: int,
    settings: ScalingSettings,
    load: Load,
    state: ScalingState,
    *,
    settled: bool,
) -> ScalingDecision:
    wish, reason = max(wishes(replicas, settings, load), key=lambda item: item[0])
    wish = min(max(wish, settings.minimum), settings.maximum)
    if wish > replicas:
        least = min(state.up_to or wish, wish)
        since = state.up_since or now
        left = settings.up_seconds - (now - since).total_seconds()
        kept = replace(state, up_since=since, up_to=least, down_since=None, down_to=None)
        if left > 0:
            return ScalingDecision(replicas, kept, next_seconds=left)
        return ScalingDecision(least, ScalingState(), reason)
    # Without a ready pod nothing is known of what they carry: one that comes up is not taken away.
    if wish < replicas and load.ready > 0:
        most = max(state.down_to or wish, wish)
        since = state.down_since or now
        left = settings.down_seconds - (now - since).total_seconds()
        kept = replace(state, down_since=since, down_to=most, up_since=None, up_to=None)
        if left > 0 or not settled:
            return ScalingDecision(replicas, kept, next_seconds=left if left > 0 else None)
        idle = ScalingState(idle_since=state.idle_since)
        return ScalingDecision(most, idle, f"at most this was needed: {reason}")
    return ScalingDecision(
        replicas, replace(state, up_since=None, up_to=None, down_since=None, down_to=None)
    )


def wishes(replicas: int, settings: ScalingSettings, load: Load) -> Iterator[tuple[int, str]]:
    """Size that each signal asks for, before limits, with its figures."""
    total = load.requests + load.held
    yield (
        _wish(total / settings.requests, replicas, settings.tolerance),
        f"requests {total:.0f}, target {settings.requests} for each replica",
    )
    expected = total + load.growth * settings.cold_start_seconds
    room = settings.requests * replicas * (1 + settings.tolerance)
    if load.growth > 0 and expected > room:
        size = min(_up(expected / settings.requests), _MOST_GROWTH * replicas)
        seconds = settings.cold_start_seconds
        yield size, f"requests {total:.0f}, {expected:.0f} expected in {seconds:.0f} s"
    if settings.kv_cache is not None and load.ready:
        yield (
            _wish(load.kv_cache / settings.kv_cache, load.ready, settings.tolerance),
            f"KV cache {load.kv_cache / load.ready:.0%} in use, target {settings.kv_cache:.0%}",
        )
    if settings.ttft_seconds is not None and load.ready and load.ttft_p95_seconds is not None:
        exact = load.ready * load.ttft_p95_seconds / settings.ttft_seconds
        size = min(_wish(exact, load.ready, settings.tolerance), _MOST_GROWTH * load.ready)
        figures = f"{load.ttft_p95_seconds:.2f} s, target {settings.ttft_seconds:g} s"
        yield size, f"p95 of the time to first token {figures}"


def _wish(exact: float, present: int, tolerance: float) -> int:
    """Replicas for an exact need; the present ones where it is near enough."""
    return present if abs(exact - present) <= tolerance * present else _up(exact)


def _up(exact: float) -> int:
    return math.ceil(exact - _ROUNDING)
