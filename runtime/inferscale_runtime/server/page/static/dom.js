// Elements, always built from text: nothing that comes from the server is ever read as markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function button(text, label, action) {
  const made = element("button", text, { type: "button", "aria-label": label });
  made.addEventListener("click", action);
  return made;
}

export function row(...cells) {
  const made = document.createElement("tr");
  for (const cell of cells) {
    const data = document.createElement("td");
    data.append(...(Array.isArray(cell) ? cell : [cell]));
    made.append(data);
  }
  return made;
}

export function showError(error) {
  if (error?.name === "AbortError") return;
  byId("error").textContent = error?.message || String(error);
  byId("error").hidden = false;
}

export function clearError() {
  byId("error").hidden = true;
  byId("error").textContent = "";
}

export function say(text) {
  byId("status").textContent = text;
}

// Runs an action of the reader's: its failure is shown, and what was pressed rests meanwhile.
export function guarded(action, pressed = null) {
  return async (event) => {
    event?.preventDefault();
    const control = pressed || event?.submitter;
    if (control?.disabled) return;
    clearError();
    if (control) control.disabled = true;
    try {
      await action(event);
    } catch (error) {
      showError(error);
    } finally {
      if (control) control.disabled = false;
    }
  };
}

// Asks before something is done. Resolves to null for "no", else to what was entered ("" without a field).
// `expected`: what must be entered, so that nobody does it by accident.
export function ask({ title, text, yes, label = "", value = "", expected = null, danger = false }) {
  const dialog = byId("confirm");
  const input = byId("confirm-input");
  const accept = byId("confirm-yes");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-field").hidden = !label;
  byId("confirm-label").textContent = label;
  input.required = Boolean(label);
  input.value = value;
  accept.textContent = yes;
  accept.className = danger ? "danger" : "";
  const matches = () => expected === null || input.value === expected;
  accept.disabled = !matches();
  return new Promise((resolve) => {
    let answer = null;
    const listeners = new AbortController();
    const on = (target, name, listener) => target.addEventListener(name, listener, { signal: listeners.signal });
    on(input, "input", () => { accept.disabled = !matches(); });
    on(byId("confirm-form"), "submit", (event) => {
      event.preventDefault();
      if (!matches()) return;
      answer = label ? input.value : "";
      dialog.close();
    });
    on(byId("confirm-no"), "click", () => dialog.close());
    on(dialog, "close", () => {
      listeners.abort();
      resolve(answer);
    });
    dialog.showModal();
    (label ? input : byId("confirm-no")).focus();
  });
}
