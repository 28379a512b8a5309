// The one dialog and the one line of feedback.
import { h, keycap, plural, replace } from "./dom.js";

const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("dialog"));
const toast = /** @type {HTMLElement} */ (document.getElementById("toast"));
let timer = 0;

dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close(); // the backdrop
});

/** @param {string} title @param {...any} content */
export function open(title, ...content) {
  const close = h("button", { type: "button", class: "plain", "aria-label": "Close", onclick: () => dialog.close() }, "✕");
  replace(dialog, h("header", {}, h("h2", {}, title), close), h("div", { class: "dialog-body" }, ...content));
  if (!dialog.open) dialog.showModal();
}

export const close = () => dialog.close();

/**
 * Says what happened, for a few seconds.
 * @param {string} text
 * @param {"note"|"problem"} [kind]
 */
export function say(text, kind = "note") {
  toast.textContent = text;
  toast.dataset.kind = kind;
  toast.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => (toast.hidden = true), kind === "problem" ? 8000 : 3200);
}

/** U takes back the last action, which may have been one of another screen.
 * @param {{images: number[], source: string}|null} undone */
export function sayUndone(undone) {
  const what = /** @type {Record<string, string>} */ ({ audit: "an answer of the audit", ignore: "what Review ignored" });
  say(undone ? `Undone: ${what[undone.source] ?? plural(undone.images.length, "label")}.` : "Nothing to undo.");
}

/** @param {unknown} error */
export const complain = (error) => say(error instanceof Error ? error.message : String(error), "problem");

/** @param {string} screen @param {string[][]} keys @param {string[][]} frame */
export function showKeys(screen, keys, frame) {
  const list = (/** @type {string[][]} */ rows) =>
    h("dl", { class: "keys" }, ...rows.map(([key, text]) => h("div", {}, h("dt", {}, ...key.split(" ").map(keycap)), h("dd", {}, text))));
  open("Keys", keys.length > 0 && h("h3", {}, screen), keys.length > 0 && list(keys), h("h3", {}, "Everywhere"), list(frame));
}
