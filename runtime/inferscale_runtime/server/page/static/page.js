// Wires the page: opening and closing a user's memory, and what each control does.

import { Client } from "./client.js";
import { ask, byId, clearError, guarded, say, showError } from "./dom.js";
import { Chat } from "./chat.js";
import { Facts } from "./facts.js";

const KEY = "inferscale.key";
const USER = "inferscale.user";

let open = null; // { client, facts, chat }

async function openUser(user, key) {
  shut();
  sessionStorage.setItem(USER, user);
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  const client = new Client(user, key);
  const facts = new Facts(client);
  say("Opening …");
  try {
    await client.findModel();
    await facts.reload();
    open = { client, facts, chat: new Chat(client, facts.texts) };
    await open.chat.showAnswers();
  } catch (error) {
    say("");
    if (error.status === 401) {
      sessionStorage.removeItem(KEY);
      byId("key").value = "";
      byId("key").focus();
    }
    throw error;
  }
  document.title = `${user} – InferScale memory`;
  byId("main").hidden = byId("close").hidden = false;
  say(`Memory of ${user}, model ${client.model}`);
}

// Nothing of a user's stays on the page.
function shut() {
  open?.chat.clear();
  open = null;
  document.title = "InferScale memory";
  byId("main").hidden = byId("close").hidden = true;
  for (const id of ["facts", "answers", "log"]) byId(id).replaceChildren();
  for (const id of ["query", "new-fact", "question"]) byId(id).value = "";
  byId("search-clear").hidden = true;
  say("");
}

function close() {
  shut();
  sessionStorage.removeItem(KEY);
  sessionStorage.removeItem(USER);
  byId("user").value = byId("key").value = "";
  clearError();
  byId("user").focus();
}

async function send() {
  const field = byId("question");
  const question = field.value.trim();
  if (!question) return;
  const k = byId("facts-number").value;
  field.value = "";
  try {
    const memory = { mode: byId("mode").value, ...(k && { k: Number(k) }) };
    await open.chat.send(question, memory, Number(byId("max-tokens").value));
  } catch (error) {
    field.value ||= question;
    throw error;
  } finally {
    field.focus();
  }
  await open.chat.showAnswers();
}

async function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await open.client.exportUser());
  link.download = "memory.jsonl";
  link.click();
  // Not at once: the download may begin a moment later.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function erase() {
  const { user } = open.client;
  const answer = await ask({
    title: "Delete this user?",
    text: "All facts of this user and everything computed from them are deleted. This cannot be undone.",
    label: `Write ${user} to confirm`,
    expected: user,
    yes: "Delete",
    danger: true,
  });
  if (answer === null) return;
  const receipt = await open.client.eraseUser();
  close();
  say(`Deleted: ${receipt.files} files, ${receipt.bytes} bytes, ${receipt.digests.length} digests in the receipt.`);
}

const on = (id, name, action, pressed = null) =>
  byId(id).addEventListener(name, guarded(action, pressed && byId(pressed)));

on("open-form", "submit", () => openUser(byId("user").value, byId("key").value.trim()));
byId("close").addEventListener("click", close);
on("search-form", "submit", () => open.facts.search(byId("query").value.trim()));
on("search-clear", "click", () => {
  byId("query").value = "";
  return open.facts.search("");
});
on("add-form", "submit", async () => {
  await open.facts.add(byId("new-fact").value.trim());
  byId("new-fact").value = "";
  byId("new-fact").focus();
});
on("previous", "click", () => open.facts.turn(false));
on("next", "click", () => open.facts.turn(true));
on("export", "click", save, "export");
on("erase", "click", erase);
on("chat-form", "submit", send, "send");
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("chat-form").requestSubmit(byId("send"));
});
byId("stop").addEventListener("click", () => open?.chat.stop());
on("new-chat", "click", () => open.chat.clear());
on("refresh", "click", () => open.chat.showAnswers(), "refresh");

byId("user").value = sessionStorage.getItem(USER) || "";
byId("key").value = sessionStorage.getItem(KEY) || "";
if (byId("user").value) openUser(byId("user").value, byId("key").value).catch(showError);
else byId("user").focus();
