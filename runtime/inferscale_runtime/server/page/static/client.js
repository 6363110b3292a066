// Calls of the server. URLs are relative to /inferscale/, so the page also works behind a path of a proxy.

export class Client {
  constructor(user, key) {
    this.user = user;
    this.key = key;
    this.model = "";
  }

  get base() {
    return `v1/users/${encodeURIComponent(this.user)}`;
  }

  async call(method, url, { body, headers = {}, signal } = {}) {
    // A router before the servers goes by the user.
    const sent = { ...headers, "x-user-id": encodeURIComponent(this.user) };
    if (this.key) sent.Authorization = `Bearer ${this.key}`;
    if (body !== undefined) sent["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(url, {
        method,
        headers: sent,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer. Is it running, and is this computer online?");
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }

  async json(method, path, options) {
    const response = await this.call(method, this.base + path, options);
    return { body: await response.json(), etag: response.headers.get("ETag") };
  }

  async findModel() {
    const response = await this.call("GET", "../v1/models");
    this.model = (await response.json()).data[0].id;
  }

  async listFacts(limit, after) {
    const query = new URLSearchParams({ limit: String(limit) });
    if (after) query.set("after", after);
    const empty = { facts: [], next: null };
    return unlessUnknown(this.json("GET", `/facts?${query}`).then(({ body }) => body), "user", empty);
  }

  async searchFacts(query, k) {
    const found = this.json("POST", "/search", { body: { query, k } });
    return unlessUnknown(found.then(({ body }) => body.facts), "user", []);
  }

  // Null when it is not there any more.
  async factText(id) {
    const found = this.json("GET", `/facts/${encodeURIComponent(id)}`);
    return unlessUnknown(found.then(({ body }) => body.text), "id", null);
  }

  addFact(text) {
    return this.json("PUT", "/facts", { body: { facts: [{ text }] }, headers: once() });
  }

  // Refuses when the fact is not what the reader saw: somebody else corrected it meanwhile.
  async correctFact(fact, text) {
    const path = `/facts/${encodeURIComponent(fact.id)}`;
    const current = await this.json("GET", path);
    if (current.body.text !== fact.text) {
      throw new Error("This fact was changed by somebody else meanwhile. It is shown as it is now; correct it again.");
    }
    const { time, turn_id } = current.body;
    const headers = once();
    if (current.etag) headers["If-Match"] = current.etag;
    const body = { text };
    if (time) body.time = time;
    if (turn_id) body.turn_id = turn_id;
    return this.json("PUT", path, { body, headers });
  }

  forgetFact(id) {
    return this.json("DELETE", `/facts/${encodeURIComponent(id)}`, { headers: once() });
  }

  async exportUser() {
    return (await this.call("GET", `${this.base}/export`)).blob();
  }

  async eraseUser() {
    return (await this.json("DELETE", "", { headers: once() })).body;
  }

  async lastAnswers() {
    return (await this.json("GET", "/answers")).body.answers;
  }

  // Streams one answer; `onText` gets each piece. Resolves to usage.memory and the time to the first token.
  async chat(messages, memory, maxTokens, onText, signal) {
    const started = performance.now();
    const response = await this.call("POST", "../v1/chat/completions", {
      body: {
        model: this.model,
        messages,
        max_tokens: maxTokens,
        stream: true,
        stream_options: { include_usage: true },
        memory: { user: this.user, ...memory },
      },
      signal,
    });
    const used = { memory: JSON.parse(response.headers.get("x-inferscale-memory") || "null"), ttft: null };
    for await (const chunk of chunks(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message || "The answer broke off.");
      const text = chunk.choices?.[0]?.delta?.content;
      if (text) {
        used.ttft ??= (performance.now() - started) / 1000;
        onText(text);
      }
      used.memory = chunk.usage?.memory || used.memory;
    }
    return used;
  }
}

// The same request sent twice, by a proxy or after a lost answer, is done once.
function once() {
  // Not crypto.randomUUID: it exists in secure contexts only, and the page is often opened over plain HTTP.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return { "Idempotency-Key": Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("") };
}

export const newName = () => once()["Idempotency-Key"];

async function* chunks(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

// A user without facts is unknown to the server, which is no error here.
async function unlessUnknown(promise, param, otherwise) {
  try {
    return await promise;
  } catch (error) {
    if (error.status === 404 && error.param === param) return otherwise;
    throw error;
  }
}

const MEANINGS = {
  401: "The key was not accepted. Enter another key and open again.",
  403: "This key may not do that, or not for this user.",
  412: "Somebody else changed this meanwhile. It is shown as it is now; try again.",
  429: "Too many requests. Wait a moment and try again.",
};

async function refusal(response) {
  let detail = "";
  let param = null;
  try {
    ({ message: detail = "", param = null } = (await response.json()).error || {});
  } catch {
    // Not every answer of a proxy is JSON; the status says enough.
  }
  const text = MEANINGS[response.status] || `The server refused (HTTP ${response.status}).`;
  const error = new Error(detail ? `${text} Server: ${detail}` : text);
  Object.assign(error, { status: response.status, param });
  return error;
}
