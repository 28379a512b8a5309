// Start: what is here, which classes there are, and how far the preparation is. Usable before a feature is computed.
import { get } from "./api.js";
import { ClassPanel } from "./classes.js";
import { count, duration, h, keycap, plural, replace } from "./dom.js";
import { isLetter } from "./keys.js";
import { store, thumbnail } from "./state.js";

const PLACES = 6; // of the pile, evenly spaced
const EACH = 10; // thumbnails per place
const KEYS = [["a … z", "name a class; Enter adds it"], ["Enter", "start to label"]];

class StartScreen {
  constructor() {
    const { project } = /** @type {import("./state.js").State} */ (store.state);
    this.panel = new ClassPanel({ pick: () => this.panel.input.focus(), other: "", done: () => this.go() });
    this.step = h("p", { class: "quiet" });
    this.progress = h("section", { class: "preparation" });
    this.begin = h("a", { class: "button primary", href: "#label" }, "Start to label", keycap("↵"));
    this.pile = h("div", { class: "pile", "aria-label": "Some of the images" });
    this.element = h("div", { class: "page start" },
      h("header", { class: "page-head" },
        h("p", { class: "eyebrow" }, "finessl studio"),
        h("h1", {}, project.name),
        h("p", { class: "quiet" }, `${plural(project.images, "image")} in `, h("span", { class: "path" }, project.data), ". They are never moved or changed; labels are kept in ", h("span", { class: "path" }, project.folder), "."),
        ...(project.notes ?? []).map((note) => h("p", { class: "callout" }, note))),
      h("div", { class: "columns" },
        h("section", { class: "naming" }, h("h2", {}, "Classes"), this.step, this.panel.element, h("div", { class: "actions" }, this.begin), this.progress),
        h("section", {}, h("h2", {}, "The pile"), this.pile)));
    void this.show();
  }

  async show() {
    try {
      const total = store.state?.project.images ?? 0;
      const offsets = total > PLACES * EACH ? Array.from({ length: PLACES }, (_, k) => Math.floor((k * total) / PLACES)) : [0];
      const limit = offsets.length > 1 ? EACH : PLACES * EACH;
      const pages = await Promise.all(offsets.map((offset) => get("/api/grid", { label: "any", sort: "name", offset, limit })));
      const items = pages.flatMap((page) => page.items);
      const rest = total - items.length;
      replace(this.pile, ...items.map((/** @type {{id: number, name: string}} */ item) => h("img", { src: thumbnail(item.id), alt: item.name, title: item.name, loading: "lazy", decoding: "async", onerror: (/** @type {Event} */ event) => /** @type {Element} */ (event.target).remove() })),
        rest > 0 && h("p", { class: "quiet" }, `and ${count(rest)} more`));
    } catch (error) {
      replace(this.pile, h("p", { class: "quiet" }, error instanceof Error ? error.message : ""));
    }
  }

  update() {
    const { classes, features, labels } = /** @type {import("./state.js").State} */ (store.state);
    this.step.textContent = classes.length
      ? "Add more at any time, also while you label."
      : "Type the name of a class and press Enter; two or more make a classifier.";
    this.begin.firstChild.textContent = labels ? "Go on labeling" : "Start to label";
    this.begin.classList.toggle("waiting", classes.length === 0);
    this.panel.update();
    this.drawProgress(features);
  }

  /** @param {import("./state.js").Features} features */
  drawProgress({ done, total, seconds_left: left, backbone, error }) {
    const bar = h("progress", { max: total || 1, value: done });
    if (error) return replace(this.progress, h("p", { class: "problem" }, error));
    const text = done < total
      ? `${backbone} has encoded ${count(done)} of ${count(total)} images${left ? `, ${duration(left)} left` : ""}. You can label meanwhile: the order improves as they arrive.`
      : total ? `All ${count(total)} images are encoded with ${backbone}.` : "The images are being listed.";
    replace(this.progress, done < total && bar, h("p", { class: "quiet" }, text));
  }

  go() {
    if (store.state?.classes.length) location.hash = "label";
    else this.panel.input.focus();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.key === "Enter") this.go();
    else if (event.key === "/") this.panel.search("");
    else if (isLetter(event)) this.panel.search(event.key);
    else return false;
    return true;
  }
}

export const start = {
  id: "start",
  title: "Start",
  keys: KEYS,
  mount() {
    const screen = new StartScreen();
    if (!store.state?.classes.length) queueMicrotask(() => screen.panel.input.focus());
    return { element: screen.element, update: () => screen.update(), key: (/** @type {KeyboardEvent} */ event) => screen.key(event) };
  },
};
