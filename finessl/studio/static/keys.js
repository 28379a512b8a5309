// The keyboard: a screen takes what it knows, the rest goes to the frame.

/** @typedef {(event: KeyboardEvent) => boolean} KeyHandler true: the key was used */

/** @param {EventTarget|null} target */
const typing = (target) => target instanceof HTMLElement && target.matches("input:not([type=range], [type=checkbox]), textarea, select");

/** A control that the user reached with Tab keeps Enter and Space for itself.
 * @param {KeyboardEvent} event */
const belongsToControl = (event) =>
  (event.key === "Enter" || event.key === " ") &&
  event.target instanceof HTMLElement &&
  event.target.matches("button:focus-visible, a:focus-visible, summary:focus-visible");

/** @param {() => KeyHandler|undefined} screen @param {KeyHandler} frame */
export function handleKeys(screen, frame) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (typing(event.target) || belongsToControl(event) || document.querySelector("dialog[open]")) return;
    if (screen()?.(event) || frame(event)) event.preventDefault();
  });
  // A button or link that was clicked gives the keyboard back to the screen.
  addEventListener("click", (event) => {
    const button = event.target instanceof Element ? /** @type {HTMLElement|null} */ (event.target.closest("button, a")) : null;
    if (event.detail > 0 && button && !document.querySelector("dialog[open]")) button.blur();
  });
}

/** A letter that starts the search for a class. @param {KeyboardEvent} event */
export const isLetter = (event) => /^\p{L}$/u.test(event.key);
