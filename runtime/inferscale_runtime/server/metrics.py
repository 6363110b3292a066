"""Metrics of the API process, on vLLM's own ``/metrics``. No user id and no text in labels."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter(
    "inferscale_requests_total",
    "Chat requests with memory, by the mode they were served in and why not injected.",
    ["mode", "reason"],
)
INJECTED_TOKENS = Counter(
    "inferscale_injected_tokens_total", "Prompt tokens whose KV was planned for injection."
)
UNUSABLE_SEGMENTS = Counter(
    "inferscale_unusable_segments_total",
    "Retrieved facts that went as text, by reason (missing, damaged, timeout, full).",
    ["reason"],
)
PLAN_SECONDS = Histogram(
    "inferscale_plan_seconds",
    "Retrieval, staging and prompt planning of one request.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
FIRST_TOKEN_SECONDS = Histogram(
    "inferscale_time_to_first_token_seconds",
    "From the last byte of a chat request with memory to its first token, by the mode it was "
    "served in.",
    ["mode"],
    buckets=(0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80),
)
STAGING_SECONDS = Histogram(
    "inferscale_staging_seconds",
    "Reading one request's missing segments from the store into the DRAM arena.",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
)
MEMORY_API_REQUESTS = Counter(
    "inferscale_memory_api_requests_total",
    "Requests to the memory API, by operation and HTTP status.",
    ["operation", "code"],
)
MEMORY_API_SECONDS = Histogram(
    "inferscale_memory_api_seconds",
    "Time of one request to the memory API, embedding and writing included.",
    ["operation"],
    buckets=(0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
CANARY_KL = Gauge(
    "inferscale_canary_kl",
    "KL(text || injected) in nats, mean over the canary's window; at most the true one.",
    ["store"],
)
CANARY_TOP1 = Gauge(
    "inferscale_canary_top1_agreement",
    "Share of positions at which text and injected memory expect the same token most.",
    ["store"],
)
CANARY_DEGRADED = Gauge(
    "inferscale_canary_degraded", "1 while the canary has the store served as text.", ["store"]
)
CANARY_SAMPLES = Counter(
    "inferscale_canary_samples_total",
    "Prompts that were scored both ways, by what they were scored for (start, live, recheck).",
    ["store", "trigger"],
)
ARENA_USED_BYTES = Gauge("inferscale_dram_arena_used_bytes", "Bytes of resident segments.")
ARENA_PINNED_BYTES = Gauge("inferscale_dram_arena_pinned_bytes", "Bytes that requests hold.")
ARENA_BUDGET_BYTES = Gauge("inferscale_dram_arena_budget_bytes", "Size of the DRAM arena.")
EVICTIONS = Gauge("inferscale_dram_arena_evictions", "Segments evicted since the start.")
SESSIONS = Gauge("inferscale_sessions", "Chats whose facts are kept in place.")
SESSION_REQUESTS = Counter(
    "inferscale_session_requests_total",
    "Requests of a session, by what became of it (started, continued, restarted).",
    ["state"],
)
