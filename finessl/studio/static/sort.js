// Sort: a wall per suggested class, most typical first. Mark the wrong ones, Enter accepts the rest of what was seen.
import { get, save } from "./api.js";
import { chip, ClassPanel } from "./classes.js";
import * as dialog from "./dialog.js";
import { empty, h, keycap, keyline, percent, plural, replace } from "./dom.js";
import { Grid } from "./grid.js";
import { isLetter } from "./keys.js";
import { dragSelect } from "./marquee.js";
import { className, classById, classes, classOfKey, large, store } from "./state.js";
import { Thumbnails } from "./thumbnails.js";

/** @typedef {{id: number, name: string, class: number|null, p: number|null, label: number|null|"none"}} Cell */

const SIZES = [90, 120, 150, 200, 270, 360];
const BATCH = 1000; // images per request
const CONFIDENCE = [["", "any confidence"], ["0.9-1", "90 % and more"], ["0.7-0.9", "70 to 90 %"], ["0.5-0.7", "50 to 70 %"], ["0-0.5", "below 50 %"]];
const LABELED = [["none", "unlabeled"], ["yes", "labeled"], ["any", "all images"]];
const SOURCES = [["", "any source"], ["queue", "from Label"], ["sort", "from Sort"], ["review", "from Review"], ["data", "given with the data"]];
const ORDERS = [["typical", "most typical first"], ["doubt", "most doubtful first"], ["name", "by name"]];
const KEYS = [
  ["Click", "mark as wrong; Shift for a range, drag for many"], ["Enter", "accept the seen images that are not marked"], ["1 … 9", "label the marked ones as another class; or type its name"],
  ["X", "marked ones: none of these classes"], ["← ↑ ↓ →", "move"], ["Space", "mark or unmark"], ["Z", "look at it large"], ["+ −", "size"], ["Tab", "to the filters"], ["U", "undo"], ["Esc", "unmark all"], [", .", "previous, next class"], ["0", "all images"],
];

/** @param {string} label @param {string[][]} options @param {() => void} onchange @returns {HTMLSelectElement} */
const chooser = (label, options, onchange) =>
  h("select", { "aria-label": label, onchange }, ...options.map(([value, text]) => h("option", { value }, text)));

class SortScreen {
  constructor() {
    /** @type {number|null|undefined} */
    this.wall = classes()[0]?.id; // null: all images
    /** @type {Map<number|undefined|null, Set<number>>} marked images per wall: they stay marked, so that a second Enter spares them */
    this.wrong = new Map();
    /** @type {Set<number>} */
    this.seen = new Set();
    this.cursor = -1;
    this.anchor = 0;
    this.size = 2;
    const reload = () => void this.reload();
    this.filters = { label: chooser("Labeled or not", LABELED, reload), p: chooser("Confidence", CONFIDENCE, reload), source: chooser("Source of the label", SOURCES, reload), sort: chooser("Order", ORDERS, reload) };
    this.search = h("input", { type: "search", placeholder: "File name", "aria-label": "Search by file name", oninput: () => this.typed() });
    this.thumbnails = new Thumbnails((image) => this.grid.shows(image));
    this.grid = new Grid({ load: (offset, limit, signal) => this.load(offset, limit, signal), draw: (cell, item, index) => this.drawCell(cell, item, index), settled: () => this.look(), failed: dialog.complain, size: SIZES[this.size] });
    this.grid.element.addEventListener("click", (event) => this.clicked(event));
    this.grid.element.addEventListener("dblclick", (event) => this.enlarge(this.indexOf(event)));
    dragSelect(this.grid.element, (indices) => this.markMany(indices));
    this.panel = new ClassPanel({ pick: (id, typed) => void (typed && this.marked.size ? this.relabel(id) : this.open(id)), selected: () => this.wall, other: "all", label: "Walls" });
    this.heading = h("h1", {});
    this.note = h("div", { class: "grid-note", hidden: true });
    this.accept = h("button", { type: "button", class: "primary", onclick: () => void this.acceptRest() });
    this.element = h("div", { class: "bench sort" },
      h("div", { class: "stage" },
        h("header", { class: "tools" }, this.heading, h("div", { class: "filters" }, ...Object.values(this.filters), this.search, this.zoomer())),
        h("div", { class: "grid-frame" }, this.grid.element, this.note),
        h("footer", { class: "foot" }, h("div", { class: "evidence" }, this.accept, this.tally = h("span", { class: "quiet" })),
          keyline([["click", "mark the wrong ones"], ["Enter", "accept the rest"], ["1–9", "label the marked"], ["U", "undo"], ["Z", "large"]]))),
      h("aside", { class: "side" }, this.panel.element));
    void this.reload();
  }

  zoomer() {
    this.slider = h("input", { type: "range", min: "0", max: String(SIZES.length - 1), value: String(this.size), "aria-label": "Size of the images", oninput: () => this.zoom(Number(this.slider.value) - this.size) });
    return h("label", { class: "zoomer" }, h("span", { "aria-hidden": "true" }, "▪"), this.slider, h("span", { "aria-hidden": "true" }, "◼"));
  }

  /** The marked images of this wall. */
  get marked() {
    const found = this.wrong.get(this.wall) ?? new Set();
    this.wrong.set(this.wall, found);
    return found;
  }

  /** @param {number} offset @param {number} limit @param {AbortSignal} signal */
  load(offset, limit, signal) {
    const [min, max] = this.filters.p.value.split("-");
    return get("/api/grid", { class: this.wall, label: this.filters.label.value, min, max, source: this.filters.source.value, q: this.search.value.trim(), sort: this.filters.sort.value, offset, limit }, signal);
  }

  typed() {
    clearTimeout(this.pause);
    this.pause = setTimeout(() => void this.reload(), 150);
  }

  async reload() {
    this.loading = true;
    this.version = store.state?.version;
    this.seen.clear();
    this.cursor = -1;
    this.filters.source.hidden = this.filters.label.value === "none"; // an unlabeled image has no source
    if (this.filters.source.hidden) this.filters.source.value = "";
    await this.grid.reset();
    this.loading = false;
    this.drawFrame();
  }

  /** @param {number|null} id */
  open(id) {
    this.wall = id;
    this.panel.update();
    void this.reload();
  }

  /** Whatever rests in view has been seen. */
  look() {
    const [first, last] = this.grid.inView();
    for (let index = first; index < last; index++) {
      const item = this.grid.items.get(index);
      if (item) this.seen.add(item.id);
    }
    this.drawFrame();
  }

  /** @returns {Cell[]} what Enter accepts */
  rest() {
    if (typeof this.wall !== "number") return [];
    const marked = this.marked;
    return [...this.grid.items.values()].filter((item) => this.seen.has(item.id) && !marked.has(item.id) && item.label === null);
  }

  /** @param {HTMLElement} cell @param {Cell|undefined} item @param {number} index */
  drawCell(cell, item, index) {
    const marked = item !== undefined && this.marked.has(item.id);
    cell.classList.toggle("marked", marked);
    cell.classList.toggle("cursor", index === this.cursor);
    cell.setAttribute("aria-selected", String(marked));
    const same = cell.dataset.id === String(item?.id);
    if (same && cell.dataset.label === String(item?.label)) return;
    cell.dataset.id = String(item?.id);
    cell.dataset.label = String(item?.label);
    if (!item) return replace(cell);
    cell.title = item.name;
    replace(cell, same ? cell.firstChild : this.thumbnails.make(item), h("span", { class: "cross", "aria-hidden": "true" }, "✕"),
      item.label !== null ? chip(item.label) : item.p !== null && h("span", { class: "share" }, percent(item.p)));
  }

  drawFrame() {
    const { total } = this.grid;
    const name = typeof this.wall === "number" ? className(this.wall) : "all images";
    replace(this.heading, typeof this.wall === "number" ? chip(this.wall) : "All images", h("small", {}, plural(total, "image")));
    const rest = this.rest().length;
    const marked = this.marked.size;
    replace(this.accept, rest ? `Accept ${plural(rest, "image")} as ${name}` : "Nothing to accept", keycap("↵"));
    this.accept.disabled = rest === 0;
    this.tally.textContent = marked ? `${plural(marked, "image")} marked${typeof this.wall === "number" ? " as wrong" : ""} · a number or a name labels ${marked === 1 ? "it" : "them"} as another class` : rest ? "what you have seen so far; scroll for more" : this.wall === null ? "mark images, then press the number of their class" : classes().length ? "" : "name a class first: type its name and press Enter";
    this.note.hidden = total > 0;
    if (total === 0) replace(this.note, this.nothing());
  }

  nothing() {
    const { features, labels, classes: named } = /** @type {import("./state.js").State} */ (store.state);
    const back = h("a", { class: "button", href: "#label" }, "Label");
    if (!named.length) return empty("No class yet", "Name the classes first, then label a few images of each.", h("a", { class: "button", href: "#start" }, "Name classes"));
    if (this.search.value || this.filters.p.value || this.filters.source.value) return empty("No image fits the filters", "Widen the confidence or clear the search.");
    if (this.wall === null) return empty(this.filters.label.value === "yes" ? "Nothing is labeled yet" : "Every image has a label", "Show all images, or open the wall of a class.");
    if (features.error) return empty("No suggestions", features.error);
    if (labels < 2) return empty("Nothing is suggested yet", "Label a few images of each class; then the rest is sorted by what it looks like.", back);
    return empty(`No image looks like ${className(this.wall)}`, features.done < features.total ? "Images are still being encoded: more will come." : "Choose another class, or show labeled images too.", back);
  }

  /** @param {MouseEvent} event */
  indexOf(event) {
    const cell = event.target instanceof Element ? /** @type {HTMLElement|null} */ (event.target.closest(".cell")) : null;
    return cell ? Number(cell.dataset.index) : -1;
  }

  /** @param {MouseEvent} event */
  clicked(event) {
    const index = this.indexOf(event);
    if (index < 0) return;
    if (event.shiftKey) this.markMany(Array.from({ length: Math.abs(index - this.anchor) + 1 }, (_, k) => Math.min(index, this.anchor) + k));
    else this.toggle(index);
    this.anchor = this.cursor = index;
    this.grid.redraw();
  }

  /** @param {number} index */
  toggle(index) {
    const item = this.grid.items.get(index);
    if (!item) return;
    if (!this.marked.delete(item.id)) this.marked.add(item.id);
    this.grid.redraw();
    this.drawFrame();
  }

  /** @param {number[]} indices */
  markMany(indices) {
    for (const index of indices) {
      const item = this.grid.items.get(index);
      if (item) this.marked.add(item.id);
    }
    this.grid.redraw();
    this.drawFrame();
  }

  async acceptRest() {
    const ids = this.rest().map((item) => item.id);
    if (ids.length && typeof this.wall === "number") await this.give(ids, this.wall);
  }

  /** @param {number|null} classId */
  async relabel(classId) {
    const ids = [...this.marked];
    if (!ids.length) return dialog.say("Mark images first: click them.");
    this.marked.clear();
    await this.give(ids, classId);
  }

  /** @param {number[]} ids @param {number|null} classId */
  async give(ids, classId) {
    try {
      for (let k = 0; k < ids.length; k += BATCH) await save("/api/labels", { images: ids.slice(k, k + BATCH), class: classId, source: "sort" });
      dialog.say(`${plural(ids.length, "image")} labeled ${className(classId)}. U undoes it.`);
    } catch (error) {
      dialog.complain(error);
    }
    await this.reload();
  }

  async undo() {
    try {
      const { undone } = await save("/api/undo", {}, { repeat: false });
      dialog.sayUndone(undone);
      await this.reload();
    } catch (error) {
      dialog.complain(error);
    }
  }

  /** @param {number} by */
  zoom(by) {
    this.size = Math.max(0, Math.min(SIZES.length - 1, this.size + by));
    this.slider.value = String(this.size);
    this.grid.resize(SIZES[this.size]);
  }

  /** @param {number} index */
  enlarge(index) {
    const item = this.grid.items.get(index);
    if (item) dialog.open(item.name, h("img", { class: "large", src: large(item.id), alt: item.name }), h("p", {}, item.class !== null && chip(item.class, item.p !== null && h("b", {}, percent(item.p)))));
  }

  /** @param {number} by */
  move(by) {
    this.cursor = Math.max(0, Math.min(this.grid.total - 1, this.cursor < 0 ? 0 : this.cursor + by));
    this.grid.reveal(this.cursor);
    this.grid.redraw();
  }

  /** @param {number} by */
  turn(by) {
    const ids = classes().map((one) => one.id);
    if (ids.length) this.open(ids[(ids.indexOf(/** @type {number} */ (this.wall)) + by + ids.length) % ids.length]);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const chosen = classOfKey(event.key);
    const key = event.key.toLowerCase();
    const arrows = { arrowleft: -1, arrowright: 1, arrowup: -this.grid.columns, arrowdown: this.grid.columns };
    if (chosen) void (this.marked.size ? this.relabel(chosen.id) : this.open(chosen.id));
    else if (key === "0") this.open(null);
    else if (key in arrows) this.move(arrows[/** @type {keyof typeof arrows} */ (key)]);
    else if (key === "enter") void this.acceptRest();
    else if (key === " ") this.cursor >= 0 && this.toggle(this.cursor);
    else if (key === "x") void this.relabel(null);
    else if (key === "u") void this.undo();
    else if (key === "z") this.enlarge(Math.max(0, this.cursor));
    else if (key === "+" || key === "=") this.zoom(1);
    else if (key === "-") this.zoom(-1);
    else if (key === "," || key === ".") this.turn(key === "." ? 1 : -1);
    else if (key === "escape") { this.marked.clear(); this.grid.redraw(); this.drawFrame(); }
    else if (key === "/") this.panel.search("");
    else if (isLetter(event)) this.panel.search(event.key);
    else return false;
    return true;
  }

  update() {
    const wanted = store.wall;
    if (wanted) {
      store.wall = null;
      this.filters.label.value = wanted.label;
      this.open(wanted.id);
    } else if (this.wall === undefined && classes().length) this.open(classes()[0].id);
    else if (typeof this.wall === "number" && !classById(this.wall)) this.open(classes()[0]?.id ?? null); // merged away
    else if (!this.grid.total && !this.loading && store.state?.version !== this.version) void this.reload(); // suggestions may have come
    this.panel.update();
    this.drawFrame();
  }
}

export const sort = {
  id: "sort",
  title: "Sort",
  keys: KEYS,
  mount() {
    const screen = new SortScreen();
    return { element: screen.element, update: () => screen.update(), key: (/** @type {KeyboardEvent} */ event) => screen.key(event), leave: () => screen.grid.destroy() };
  },
};
