// The chat, and what went into the last answers.

import { byId, element, guarded, row } from "./dom.js";
import { newName } from "./client.js";

export class Chat {
  constructor(client, texts) {
    this.client = client;
    this.texts = texts; // fact id -> text, as far as the page has seen it
    this.clear();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.session = newName();
    byId("log").replaceChildren();
  }

  stop() {
    this.running?.abort();
  }

  add(who, text) {
    const item = element("li", "", { class: who === "You" ? "user" : "model" });
    const body = element("span", text);
    item.append(element("span", who, { class: "who" }), body);
    byId("log").append(item);
    item.scrollIntoView({ block: "nearest" });
    return { item, body };
  }

  async send(question, memory, maxTokens) {
    const asked = this.add("You", question);
    const messages = [...this.messages, { role: "user", content: question }];
    const { item, body } = this.add("Model", "");
    this.running = new AbortController();
    byId("stop").hidden = false;
    try {
      const used = await this.client.chat(
        messages,
        { session: this.session, ...memory },
        maxTokens,
        (text) => { body.textContent += text; },
        this.running.signal,
      );
      item.append(element("span", describe(used.memory, used.ttft), { class: "used" }));
    } catch (error) {
      // An answer that broke off is no part of the conversation.
      if (body.textContent) item.append(element("span", "broken off", { class: "used" }));
      else item.remove();
      if (!body.textContent) asked.item.remove();
      throw error;
    } finally {
      byId("stop").hidden = true;
      this.running = null;
    }
    this.messages = [...messages, { role: "assistant", content: body.textContent }];
  }

  async showAnswers() {
    const answers = await this.client.lastAnswers();
    byId("answers-caption").textContent = answers.length ? "" : "None yet.";
    byId("answers").replaceChildren(...answers.map((answer) => this.answerLine(answer)));
  }

  answerLine(answer) {
    const time = new Date(answer.time);
    const shown = element("time", time.toLocaleTimeString(), { datetime: answer.time });
    const number = answer.fact_ids.length;
    const details = element("details");
    const list = element("ul");
    details.append(element("summary", `${number} ${number === 1 ? "fact" : "facts"}`), list);
    details.addEventListener("toggle", guarded(() => this.showTexts(list, answer.fact_ids)), { once: true });
    return row(shown, describe(answer), seconds(answer.ttft_seconds), number ? details : "none");
  }

  // The answers name facts by id only; a text that the page has not seen yet is asked for.
  async showTexts(list, ids) {
    for (const id of ids) {
      const text = this.texts.get(id) ?? (await this.client.factText(id));
      if (text !== null) this.texts.set(id, text);
      list.append(element("li", text ?? "a fact that was forgotten since"));
    }
  }
}

const seconds = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(3)} s`);

function describe(memory, ttft) {
  if (!memory) return "";
  const parts = [memory.mode === "none" ? "no memory" : `memory ${memory.mode}`];
  if (memory.injected_tokens) parts.push(`${memory.injected_tokens} tokens injected`);
  if (memory.text_tokens) parts.push(`${memory.text_tokens} read as text`);
  if (memory.reason) parts.push(`reason: ${memory.reason}`);
  if (memory.session) parts.push(`session ${memory.session}`);
  if (ttft !== undefined) parts.push(`first token after ${seconds(ttft)}`);
  return parts.join(", ");
}
