// Elements from plain values. Text becomes text nodes: class and file names never reach the HTML parser.

const SVG = "http://www.w3.org/2000/svg";

/**
 * @param {Element} element
 * @param {Record<string, any>} props
 * @param {any[]} children
 */
function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * An HTML element: `h("button", {class: "primary", onclick: save}, "Save")`.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...any} children
 * @returns {any}
 */
export const h = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);

/**
 * An SVG element.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...any} children
 * @returns {any}
 */
export const s = (tag, props = {}, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** @param {string} key */
export const keycap = (key) => h("kbd", { class: "keycap" }, key);

/** Keys that have no button elsewhere: the hint is one, for a finger. */
const TOUCHED = /** @type {Record<string, string>} */ ({ U: "u", "←": "ArrowLeft", "→": "ArrowRight" });

/**
 * The line of keys below a screen: `keyline([["Space", "accept"], …])`.
 * @param {string[][]} keys
 */
export const keyline = (keys) =>
  h("p", { class: "keyline" }, ...keys.map(([key, text]) => (TOUCHED[key]
    ? h("button", { type: "button", class: "hint", onclick: () => dispatchEvent(new KeyboardEvent("keydown", { key: TOUCHED[key] })) }, keycap(key), text)
    : h("span", {}, keycap(key), text))));

/**
 * What a screen shows when there is nothing to show: what is missing, and what to do.
 * @param {string} title
 * @param {string} text
 * @param {...any} actions
 */
export const empty = (title, text, ...actions) =>
  h("div", { class: "empty" }, h("h2", {}, title), h("p", {}, text), actions.length > 0 && h("div", { class: "actions" }, ...actions));

/** Replaces the children only if they differ: what is as it was costs no layout, and its images stay.
 * @param {HTMLElement} parent @param {...any} children */
export function renew(parent, ...children) {
  const made = h("div", {}, ...children);
  const equal = made.childNodes.length === parent.childNodes.length && [...made.childNodes].every((node, k) => node.isEqualNode(parent.childNodes[k]));
  if (!equal) parent.replaceChildren(...made.childNodes);
}

/** @param {HTMLElement} parent @param {...any} children */
export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

/** @param {number} n */
export const count = (n) => n.toLocaleString("en-US");

/** @param {number} n @param {string} one @param {string} [many] */
export const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;

/** @param {number} p share, 0 to 1 */
export const percent = (p) => `${Math.round(100 * p)} %`;

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}
