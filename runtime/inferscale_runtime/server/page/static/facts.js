// The table of facts: pages, search, add, correct, forget.

import { ask, button, byId, element, guarded, row, say } from "./dom.js";

const PAGE_SIZE = 20;
const FOUND = 20;

export class Facts {
  constructor(client) {
    this.client = client;
    this.texts = new Map();
    this.pages = [""]; // where each page that was seen begins
    this.query = "";
  }

  async reload() {
    if (this.query) return this.search(this.query);
    const page = await this.page();
    if (!page.facts.length && this.pages.length > 1) {
      this.pages.pop();
      return this.reload();
    }
    this.next = page.next;
    const number = this.pages.length;
    this.show(page.facts, page.facts.length || number > 1 ? `Page ${number}` : "No facts yet. What is added here is in the very next answer.");
    byId("previous").disabled = number === 1;
    byId("next").disabled = !page.next;
  }

  async page() {
    try {
      return await this.client.listFacts(PAGE_SIZE, this.pages.at(-1));
    } catch (error) {
      // The fact that the page begins after was forgotten meanwhile.
      if (error.param !== "after" || this.pages.length === 1) throw error;
      this.pages = [""];
      return this.page();
    }
  }

  async search(query) {
    this.query = query;
    const facts = query ? await this.client.searchFacts(query, FOUND) : null;
    byId("search-clear").hidden = !query;
    if (!facts) return this.reload();
    this.show(facts, facts.length ? `${facts.length} facts, nearest first` : "Nothing found.");
    byId("previous").disabled = byId("next").disabled = true;
  }

  async turn(forward) {
    if (forward && this.next) this.pages.push(this.next);
    else if (!forward && this.pages.length > 1) this.pages.pop();
    await this.reload();
  }

  show(facts, caption) {
    byId("facts-caption").textContent = caption;
    byId("facts").replaceChildren(...facts.map((fact) => this.line(fact)));
    for (const fact of facts) this.texts.set(fact.id, fact.text);
  }

  line(fact) {
    const text = element("span", fact.text);
    const served = fact.injectable ? "injected" : "as text";
    const title = fact.injectable ? "Its KV is stored." : "Not encoded yet: it is read as text.";
    const correct = button("Correct", `Correct: ${fact.text}`, guarded(() => this.correct(fact)));
    const forget = button("Forget", `Forget: ${fact.text}`, guarded(() => this.forget(fact)));
    const from = [fact.origin || "encoded input", fact.time].filter(Boolean).join(", ");
    return row(text, from, element("span", served, { title }), [correct, forget]);
  }

  async add(text) {
    await this.client.addFact(text);
    say("Added. It is in the very next answer.");
    await this.reload();
  }

  async correct(fact) {
    const text = await ask({
      title: "Correct this fact",
      text: "The old text is not used again from now on.",
      label: "Fact",
      value: fact.text,
      yes: "Save",
    });
    if (text === null || text === fact.text) return;
    try {
      await this.client.correctFact(fact, text);
      say("Corrected.");
    } finally {
      await this.reload();
    }
  }

  async forget(fact) {
    const text = `“${fact.text}” is taken out of the memory and of everything that was computed from it.`;
    if ((await ask({ title: "Forget this fact?", text, yes: "Forget", danger: true })) === null) return;
    try {
      await this.client.forgetFact(fact.id);
      this.texts.delete(fact.id);
      say("Forgotten.");
    } finally {
      await this.reload();
    }
    byId("facts-title").scrollIntoView({ block: "nearest" });
  }
}
