// Requests to the server that served this page, and its event stream.
import { store, update, updateTraining } from "./state.js";

/** The server answered that it will not do it; `message` says why. */
export class Refused extends Error {
  /** @param {string} message @param {number} status */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The server did not answer. */
export class Unreachable extends Error {}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 */
async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    update({ connection: "lost" });
    throw new Unreachable("The studio does not answer.");
  }
  const answer = await response.json().catch(() => null);
  if (response.status === 401) update({ connection: "denied" });
  if (!response.ok) throw new Refused(answer?.error ?? `The studio answered with status ${response.status}.`, response.status);
  if (store.connection === "lost") update({ connection: "live" });
  return answer;
}

/**
 * @param {string} path
 * @param {Record<string, string|number|null|undefined>} [params] empty ones are left out
 * @param {AbortSignal} [signal]
 */
export function get(path, params = {}, signal) {
  const entries = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(entries.map(([name, value]) => [name, String(value)]));
  return request(entries.length ? `${path}?${query}` : path, { signal });
}

/** @param {string} path @param {object} body */
export const post = (path, body) =>
  request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Finessl": "1" },
    body: JSON.stringify(body),
  });

let last = Promise.resolve();

/**
 * A write that waits for the ones before it and repeats itself until the server answers. A label given while the server is
 * away, or was started again and does not know this page yet, is kept in the page and saved later.
 * @param {string} path
 * @param {object} body
 * @param {{repeat?: boolean}} [options] repeat: whether doing it twice is as good as doing it once
 * @returns {Promise<any>} rejected if the server refuses
 */
export function save(path, body, { repeat = true } = {}) {
  update({ unsaved: store.unsaved + 1 });
  const result = last.then(() => (repeat ? insist : post)(path, body)).finally(() => update({ unsaved: store.unsaved - 1 }));
  last = result.catch(() => undefined);
  return result;
}

/** Whether the same request may succeed later: the server is away, or was started again. @param {unknown} error */
export const transient = (error) => error instanceof Unreachable || (error instanceof Refused && (error.status === 401 || error.status >= 502));

/** @param {string} path @param {object} body */
async function insist(path, body) {
  for (let wait = 250; ; wait = Math.min(4000, 2 * wait)) {
    try {
      return await post(path, body);
    } catch (error) {
      if (!transient(error)) throw error;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

/** Follows the server's events; the browser connects again by itself. */
export function listen() {
  const source = new EventSource("/api/events");
  source.addEventListener("open", () => update({ connection: "live" }));
  source.addEventListener("state", (event) => update({ state: JSON.parse(event.data), connection: "live" }));
  source.addEventListener("training", (event) => updateTraining(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(reopen, 2000);
    if (store.connection !== "denied") update({ connection: "lost" });
  });
  addEventListener("pagehide", () => source.close());
}

/** An event stream that was refused stays closed: open it again once the server knows this page. */
async function reopen() {
  try {
    update({ state: await get("/api/state"), connection: "live" });
    listen();
  } catch {
    setTimeout(reopen, 2000);
  }
}
