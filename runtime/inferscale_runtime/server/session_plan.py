"""Between a request and its session: what stands where, and what is remembered afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inferscale_runtime.config import RuntimeConfig
from inferscale_runtime.prompt.notes import insert_notes, turn_keys, write_note
from inferscale_runtime.prompt.plan import PromptPlan
from inferscale_runtime.prompt.template import Message
from inferscale_runtime.server import metrics
from inferscale_runtime.server.options import MemoryOptions, MemoryUsage
from inferscale_runtime.server.sessions import Layout, Sessions, continue_session, start_session
from inferscale_runtime.server.stores import OpenStore
from inferscale_runtime.server.users import UserView

PASSING = frozenset({"timeout", "evicted", "segment_unreadable"})
"""Reasons that the next request need not meet: a session does not begin with them."""


class SessionPlanner:
    """The sessions of this server as its requests use them.

    Args:
        config: The server's settings.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self.sessions = Sessions(config.sessions)
        metrics.SESSIONS.set_function(lambda: len(self.sessions))

    def resume(
        self,
        opened: OpenStore,
        view: UserView,
        options: MemoryOptions,
        messages: Sequence[Message],
        best: Sequence[int],
    ) -> Layout | None:
        """Where the facts of the request's session stand.

        Args:
            opened: The user's store.
            view: The user's facts now.
            options: The request's ``memory`` object.
            messages: Its conversation.
            best: Facts retrieved for its question, best first.

        Returns:
            The layout, or None when the request has no session or begins one.
        """
        retrieval = self._config.retrieval
        # Whoever asks for no facts gets none, whatever the session has.
        wanted = retrieval.top_k if options.k is None else options.k
        if options.session is None or not wanted:
            return None
        session = self.sessions.get((opened.entry.name, options.user), options.session)
        if session is None:
            return None
        return continue_session(
            session,
            view.memory.epoch,
            view.memory.facts,
            turn_keys(messages),
            best,
            options.order or retrieval.order,
            self._config.sessions,
        )

    def noted(
        self, opened: OpenStore, view: UserView, messages: Sequence[Message], layout: Layout
    ) -> list[Message]:
        """The conversation with the facts that the session's turns added."""
        heading = self._config.sessions.note_heading
        fact_format = opened.identity.template.prompt.fact_format
        facts = view.memory.facts
        notes = {
            index: write_note(heading, fact_format, [facts[n].text for n in found])
            for index, found in layout.notes.items()
        }
        return insert_notes(messages, notes)

    def keep(
        self,
        opened: OpenStore,
        view: UserView,
        options: MemoryOptions,
        layout: Layout | None,
        plan: PromptPlan,
        usage: MemoryUsage,
    ) -> MemoryUsage:
        """Remembers the session of a planned request.

        Args:
            opened: The user's store.
            view: The user's facts.
            options: The request's ``memory`` object, with a session.
            layout: What ``resume`` gave.
            plan: The request's prompt.
            usage: What its answer says without the session.

        Returns:
            What its answer says.
        """
        owner, name = (opened.entry.name, options.user), str(options.session)
        if layout is None:
            known = self.sessions.get(owner, name) is not None
            if usage.reason in PASSING:
                return usage
            memory = view.memory
            session = start_session(memory.epoch, memory.facts, plan.order, plan.num_injectable)
            usage = replace(usage, session="restarted" if known else "started")
        else:
            session = layout.session
            noted = [n for found in layout.notes.values() for n in found]
            tokens = sum(len(view.token_ids(n, opened.identity.template)) for n in noted)
            usage = replace(
                usage,
                facts=usage.facts + len(noted),
                text_tokens=usage.text_tokens + tokens,
                session="continued",
                new_facts=layout.new_facts,
            )
        self.sessions.put(owner, name, session)
        metrics.SESSION_REQUESTS.labels(str(usage.session)).inc()
        return usage
