"""The canary: scores prompts as text and as injected, and stops injection that changes answers.

API process, through vLLM's public ``generate`` alone. An injected request makes a few tokens with
the log-probabilities of the most likely ones; text requests of the same prompt and the same tokens
give theirs. Where text goes another way, it starts again behind the injected request's token; its
prompt is in the prefix cache by then. Once users come, one prompt at a time is scored, in a moment
without users' requests. No text is logged or exported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from inferscale_runtime.config import CanaryConfig
from inferscale_runtime.prompt.template import Message
from inferscale_runtime.server import metrics
from inferscale_runtime.server.canary_figures import (
    Logprobs,
    Sample,
    StoreWatch,
    compare_positions,
)
from inferscale_runtime.server.options import MemoryOptions
from inferscale_runtime.server.service import MemoryService, Prepared
from inferscale_runtime.server.stores import OpenStore

logger = logging.getLogger("vllm.inferscale.canary")

TOP = 20
"""Log-probabilities of a position; vLLM's own default limit."""
LOOK_SECONDS = 5.0
"""How often stores are looked at for a check that is due (arbitrary)."""
IDLE_WAIT_SECONDS = 30.0
"""How long a check waits for a moment without users' requests; a server that never has one is
checked all the same (arbitrary)."""
_IDLE_POLL_SECONDS = 0.1
_LOW_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class _Prompt:
    options: MemoryOptions
    messages: Sequence[Message]
    arguments: dict[str, Any]


class Canary:
    """Watches the stores of a server.

    Args:
        service: Plans prompts and learns which stores are not to be injected.
        engine: vLLM's engine client.
        config: How much is checked, and the limits.
        clock: Seconds, monotonic.
        draw: A number from 0 to 1.
    """

    def __init__(
        self,
        service: MemoryService,
        engine: Any,
        config: CanaryConfig,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._service = service
        self._engine = engine
        self._config = config
        self._clock = clock
        self._draw = draw
        self._watches: dict[str, StoreWatch] = {}
        self._lock = asyncio.Lock()
        self._live: asyncio.Task[None] | None = None
        self._keep: asyncio.Task[None] | None = None

    def status(self, store: str) -> dict[str, Any]:
        """What is known about a store; figures are null without a sample."""
        watch = self._watches.get(store)
        figures = watch.figures if watch else None
        return {
            "state": watch.state if watch else "unknown",
            "kl": round(figures.kl, 4) if figures else None,
            "top1_agreement": round(figures.top1, 4) if figures else None,
            "samples": figures.samples if figures else 0,
        }

    async def check_stores(self, *, together: bool = False) -> None:
        """Checks every store whose check is due; those that are new, and degraded ones in time.

        Args:
            together: Score a store's prompts at once: faster, while there are no users to delay.
        """
        if not self._config.start_samples:
            return
        for opened in self._service.adopted():
            if self._watch(opened.entry.name).due(self._clock()):
                await self._check(opened, together)

    async def start(self) -> None:
        """Begins to watch; returns when every store has been checked, or the time is over."""
        first = asyncio.Event()
        self._keep = asyncio.create_task(self._watch_stores(first))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(first.wait(), self._config.start_timeout_ms / 1000)

    async def _watch_stores(self, first: asyncio.Event) -> None:
        """Runs as long as the server: stores that come later, and degraded ones again."""
        while True:
            try:
                await self.check_stores(together=not first.is_set())
            except Exception as error:
                # It must outlive one engine fault, and a later look tries again.
                logger.warning("the canary failed: %s", type(error).__name__)
            first.set()
            await asyncio.sleep(LOOK_SECONDS)

    def offer(
        self,
        options: MemoryOptions,
        conversation: Callable[[], tuple[Sequence[Message], dict[str, Any]]],
        prepared: Prepared,
    ) -> None:
        """A user's request was accepted; a share of the injected ones is scored afterwards.

        Args:
            options: The request's ``memory`` object.
            conversation: Gives messages and chat template arguments; asked for the share only.
            prepared: What was put on the request.
        """
        usage = prepared.usage
        if usage.mode != "injected" or usage.store is None or self._draw() >= self._config.sample:
            return
        if self._live is not None and not self._live.done():
            return  # one at a time; whatever comes meanwhile is as good as the next
        served = self._service.stores[usage.store]
        if served.current is not None:
            prompt = _Prompt(options, *conversation())
            self._live = asyncio.create_task(self._score_live(served.current, prompt))

    async def _score_live(self, opened: OpenStore, prompt: _Prompt) -> None:
        try:
            async with self._lock:
                sample = await self._score(opened, prompt)
                if sample is not None:
                    self._take(opened, sample, "live")
        except Exception as error:
            logger.warning("the canary failed: %s", type(error).__name__)

    def _watch(self, store: str) -> StoreWatch:
        if store not in self._watches:
            self._watches[store] = StoreWatch(self._config)
        return self._watches[store]

    async def _check(self, opened: OpenStore, together: bool) -> None:
        """Scores prompts of a store's own users, about facts that they have."""
        watch = self._watch(opened.entry.name)
        trigger = "start" if watch.state == "unknown" else "recheck"
        async with self._lock:
            prompts = await asyncio.to_thread(self._own_prompts, opened)
            if together:
                samples = await asyncio.gather(*(self._score(opened, p) for p in prompts))
            else:
                samples = [await self._score(opened, prompt) for prompt in prompts]
            found = [sample for sample in samples if sample is not None]
            if len(found) < watch.least_samples:
                watch.postpone(self._clock())
            else:
                watch.restart()
            for sample in found:
                self._take(opened, sample, trigger)

    def _own_prompts(self, opened: OpenStore) -> list[_Prompt]:
        """Prompts about the facts of the users that were written last; blocks.

        Each leaves the second half of a fact to the model: how it goes on stands in the memory
        alone, so that wrong KV shows.
        """
        wanted = self._config.start_samples
        users = [user for _, user in islice(opened.store.recent_users(), wanted)]
        found: list[_Prompt] = []
        for number in range(wanted if users else 0):
            user = users[number % len(users)]
            view = opened.users.get(user, opened.identity.fingerprint)
            usable = [f for f in view.memory.facts if f.id in view.segments] if view else []
            if usable:
                fact = usable[int(self._draw() * len(usable)) % len(usable)]
                words = fact.text.split()
                opening = " ".join(words[: (len(words) + 1) // 2])
                messages: list[Message] = [
                    {"role": "user", "content": opening},
                    {"role": "assistant", "content": opening},
                ]
                arguments = {"add_generation_prompt": False, "continue_final_message": True}
                found.append(_Prompt(MemoryOptions(user=user), messages, arguments))
        return found

    def _take(self, opened: OpenStore, sample: Sample, trigger: str) -> None:
        name = opened.entry.name
        watch = self._watch(name)
        changed = watch.add(sample, self._clock())
        figures = watch.figures
        assert figures is not None
        metrics.CANARY_SAMPLES.labels(name, trigger).inc()
        metrics.CANARY_KL.labels(name).set(figures.kl)
        metrics.CANARY_TOP1.labels(name).set(figures.top1)
        metrics.CANARY_DEGRADED.labels(name).set(watch.state == "degraded")
        if watch.state == "degraded":
            self._service.distrusted.add(name)
        else:
            self._service.distrusted.discard(name)
        if changed:
            log = logger.warning if watch.state == "degraded" else logger.info
            log(
                "store '%s': canary %s: KL %.3f (limit %g), top-1 agreement %.2f (limit %g) over "
                "%d prompts%s",
                name,
                watch.state,
                figures.kl,
                self._config.kl_limit,
                figures.top1,
                self._config.top1_limit,
                figures.samples,
                "; it is served as text" if watch.state == "degraded" else "",
            )

    async def _score(self, opened: OpenStore, prompt: _Prompt) -> Sample | None:
        """Scores one prompt; None when nothing of it can be injected."""
        await self._idle()
        prepared = await self._service.prepare_check(
            opened, prompt.options, prompt.messages, prompt.arguments
        )
        if prepared is None or prepared.token_ids is None:
            return None
        try:
            if len(prepared.token_ids) + self._config.tokens > self._longest():
                return None
            ids, salt = prepared.token_ids, prepared.salt
            tokens, injected = await self._generate(
                ids, salt, self._config.tokens, {"kv_transfer_params": prepared.params}
            )
        finally:
            self._service.end(prepared)
        text = await self._follow(ids, tokens)
        return compare_positions(text, injected)

    async def _follow(self, ids: list[int], tokens: Sequence[int]) -> list[Logprobs]:
        """Distributions of the text prompt before each of the given tokens."""
        salt = secrets.token_hex(32)
        found: list[Logprobs] = []
        while len(found) < len(tokens):
            start = len(found)
            made, logprobs = await self._generate(
                [*ids, *tokens[:start]], salt, len(tokens) - start, None
            )
            if not made:
                raise RuntimeError("the engine made no token")
            for token, position in zip(made, logprobs, strict=True):
                found.append(position)
                if token != tokens[len(found) - 1]:
                    break
        return found

    async def _generate(
        self, ids: list[int], salt: str, max_tokens: int, extra: dict[str, Any] | None
    ) -> tuple[list[int], list[Logprobs]]:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        config = self._engine.vllm_config
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            logprobs=TOP,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra,
        )
        low = _LOW_PRIORITY if config.scheduler_config.policy == "priority" else 0
        name = f"inferscale-canary-{secrets.token_hex(8)}"
        prompt = tokens_input(ids, cache_salt=salt)
        tokens: list[int] = []
        logprobs: list[Mapping[int, Any]] = []
        async for output in self._engine.generate(prompt, params, name, priority=low):
            tokens = list(output.outputs[0].token_ids)
            logprobs = list(output.outputs[0].logprobs or ())
        return tokens, [{t: v.logprob for t, v in position.items()} for position in logprobs]

    def _longest(self) -> int:
        return int(self._engine.vllm_config.model_config.max_model_len)

    async def _idle(self) -> None:
        """Waits for a moment without users' requests with memory."""
        deadline = self._clock() + IDLE_WAIT_SECONDS
        while self._service.open_requests and self._clock() < deadline:
            await asyncio.sleep(_IDLE_POLL_SECONDS)
