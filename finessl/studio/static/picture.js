// The large image. The next ones wait, loaded and decoded, so that a key shows one at once.
import { h } from "./dom.js";
import { large } from "./state.js";

const LARGEST = 12; // times its own size: beyond that a small image is a blur

export class Picture {
  constructor() {
    /** @type {Map<number, HTMLImageElement>} */
    this.images = new Map();
    /** @type {number|null} */
    this.shown = null;
    this.name = h("figcaption", {});
    this.failure = h("p", { class: "picture-failure", hidden: true });
    this.element = h("figure", { class: "picture", onclick: (/** @type {MouseEvent} */ event) => this.zoom(event) }, this.failure, this.name);
  }

  /**
   * Shows one image and prepares others.
   * @param {{id: number, name: string}} item
   * @param {number[]} next
   * @param {number} [start] time of the key press, to measure how long it took
   */
  show(item, next = [], start) {
    const load = (/** @type {number} */ id) => this.images.has(id) || this.images.set(id, this.load(id));
    load(item.id);
    for (const [id, image] of this.images) {
      image.hidden = id !== item.id;
      if (id !== item.id && !next.includes(id) && id !== this.shown) this.forget(id);
    }
    const image = /** @type {HTMLImageElement} */ (this.images.get(item.id));
    image.alt = item.name;
    this.shown = item.id;
    this.name.textContent = item.name;
    this.name.title = item.name;
    this.element.classList.remove("zoomed");
    this.failure.hidden = image.dataset.failed === undefined;
    if (start !== undefined) measure(image, start);
    afterPaint(() => this.shown === item.id && next.forEach(load));
  }

  /** @param {number} id @returns {HTMLImageElement} */
  load(id) {
    const image = /** @type {HTMLImageElement} */ (h("img", { src: large(id), alt: "", draggable: "false", decoding: "sync", hidden: true }));
    image.addEventListener("load", () => {
      image.style.maxWidth = `${LARGEST * image.naturalWidth}px`;
      image.style.maxHeight = `${LARGEST * image.naturalHeight}px`;
    });
    image.addEventListener("error", () => {
      image.dataset.failed = "";
      this.failure.textContent = "This image cannot be read. X sets it apart, → skips it.";
      if (this.shown === id) this.failure.hidden = false;
    });
    this.element.prepend(image);
    image.decode().catch(() => undefined);
    return image;
  }

  /** @param {number} id */
  forget(id) {
    this.images.get(id)?.remove();
    this.images.delete(id);
  }

  /** @param {MouseEvent} [event] where to; the centre otherwise */
  zoom(event) {
    const { element } = this;
    const box = element.getBoundingClientRect();
    const [x, y] = event ? [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height] : [0.5, 0.5];
    if (!element.classList.toggle("zoomed")) return;
    element.scrollTo(x * (element.scrollWidth - element.clientWidth), y * (element.scrollHeight - element.clientHeight));
  }

  clear() {
    for (const id of [...this.images.keys()]) this.forget(id);
    this.shown = null;
    this.name.textContent = "";
    this.failure.hidden = true;
  }
}

/** What can wait until the next frame is on the screen. @param {() => void} work */
export function afterPaint(work) {
  if (document.hidden) work(); // no frame comes
  else requestAnimationFrame(() => setTimeout(work));
}

/** Records "next-image": from the key press to the frame that shows the image.
 * @param {HTMLImageElement} image @param {number} start */
function measure(image, start) {
  const painted = () => afterPaint(() => performance.measure("next-image", { start }));
  if (image.complete) painted();
  else image.addEventListener("load", painted, { once: true });
}
