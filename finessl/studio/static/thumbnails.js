// Thumbnails of a wall, a screen in one answer: a request for each of them takes more than twice as long.
import { get, transient } from "./api.js";
import { h } from "./dom.js";
import { thumbnail } from "./state.js";

const MOST = 200; // per request, as the server allows
const PARALLEL = 2; // requests: a screen may come in two pages
const RETRY = 1000; // milliseconds

/** @typedef {{id: number, name: string}} Item */

export class Thumbnails {
  /** @param {(image: HTMLImageElement) => boolean} inView these come first */
  constructor(inView) {
    this.inView = inView;
    /** @type {Map<HTMLImageElement, Item>} */
    this.waiting = new Map();
    this.requests = 0;
    this.announced = false;
  }

  /** An image whose content comes later. @param {Item} item @returns {HTMLImageElement} */
  make(item) {
    const image = h("img", { draggable: "false", decoding: "async" });
    this.waiting.set(image, item);
    if (!this.announced) queueMicrotask(() => void this.load()); // when the whole screen waits
    this.announced = true;
    return image;
  }

  async load() {
    this.announced = false;
    if (this.requests === PARALLEL) return;
    for (const image of this.waiting.keys()) if (!image.isConnected) this.waiting.delete(image); // it has left the screen
    const all = [...this.waiting];
    const seen = all.filter(([image]) => this.inView(image));
    const batch = (seen.length ? seen : all).slice(0, MOST);
    if (!batch.length) return;
    for (const [image] of batch) this.waiting.delete(image);
    this.requests++;
    try {
      const { jpegs } = await get("/api/thumbnails", { images: batch.map(([, { id }]) => id).join(",") });
      batch.forEach(([image, { id, name }], k) => {
        image.onerror = () => image.replaceWith(h("span", { class: "unreadable" }, "cannot be read"));
        image.alt = name; // not before: without a source, it would be shown
        image.src = jpegs[k] ? `data:image/jpeg;base64,${jpegs[k]}` : thumbnail(id); // where it is not made yet
      });
    } catch (error) {
      await new Promise((resolve) => setTimeout(resolve, RETRY)); // the notice says that the server is away
      if (transient(error)) for (const [image, item] of batch) this.waiting.set(image, item);
    }
    this.requests--;
    void this.load();
  }
}
