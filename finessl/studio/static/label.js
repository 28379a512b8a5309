// Label: one image, one key. The next three images are loaded before they are needed, and a label never waits for the server.
import { get, save } from "./api.js";
import { chip, ClassPanel } from "./classes.js";
import { complain, say, sayUndone } from "./dialog.js";
import { count, empty, h, keyline, percent, plural, renew, replace } from "./dom.js";
import { isLetter } from "./keys.js";
import { afterPaint, Picture } from "./picture.js";
import { className, classes, classOfKey, store, thumbnail } from "./state.js";

/**
 * @typedef {{class: number, p: number}} Suggestion
 * @typedef {{id: number, name: string, why: string, suggestions: Suggestion[], nearest: {id: number, class: number}[]}} Item
 */

const AHEAD = 4; // the image on the screen and the next three
const KEYS = [
  ["1 … 9", "label as this class"], ["Space", "accept the suggestion"], ["X", "none of these classes"], ["U", "undo"],
  ["←", "back"], ["→", "skip"], ["Z", "zoom"], ["/", "find or add a class; other letters start at once"],
];

/** The images to come, the images before, and what was said about them in this page. */
class Queue {
  constructor() {
    /** @type {Item[]} */
    this.ahead = [];
    /** @type {Item[]} */
    this.past = [];
    /** @type {Map<number, number|null>} */
    this.given = new Map();
    /** @type {Set<number>} */
    this.skipped = new Set();
    this.left = Infinity; // images without a label, as far as the server has said
  }

  /** Suggestions are renewed in place; the order of what waits stays. @param {Item[]} items */
  merge(items) {
    for (const item of items) {
      const position = this.ahead.findIndex((one) => one.id === item.id);
      if (position >= 0) this.ahead[position] = item;
      else if (this.ahead.length < AHEAD && !this.given.has(item.id) && !this.skipped.has(item.id)) this.ahead.push(item);
    }
  }

  async refill() {
    const known = [...this.ahead.map((item) => item.id), ...this.skipped, ...this.given.keys()].slice(-200);
    const { items, left } = await get("/api/queue", { n: AHEAD, after: known.join(",") });
    this.left = left;
    this.merge(items);
  }

  /** New suggestions for what waits; what was labeled elsewhere goes, but for the image on the screen. */
  async refresh() {
    const { items, left } = await get("/api/queue", { n: 2 * AHEAD, after: [...this.skipped].slice(-200).join(",") });
    const fresh = new Set(items.map((/** @type {Item} */ item) => item.id));
    this.ahead = this.ahead.filter(({ id }, k) => k === 0 || fresh.has(id) || this.given.has(id) || this.skipped.has(id));
    this.left = left;
    this.merge(items);
  }

  /** @param {number|null} [classId] undefined: skipped */
  leave(classId) {
    const item = this.ahead.shift();
    if (!item) return;
    if (classId !== undefined) this.given.set(item.id, classId);
    else if (!this.given.has(item.id)) this.skipped.add(item.id);
    this.past.push(item);
    if (this.past.length > 500) this.past.shift();
  }

  back() {
    const item = this.past.pop();
    if (item) this.ahead.unshift(item);
    return item;
  }

  /** @param {number[]} ids images that have no label any more */
  restore(ids) {
    for (const id of ids) {
      this.given.delete(id);
      const position = this.past.findIndex((item) => item.id === id);
      if (position >= 0) this.ahead.unshift(...this.past.splice(position, 1));
    }
  }
}

class LabelScreen {
  constructor() {
    this.queue = new Queue();
    this.picture = new Picture();
    this.panel = new ClassPanel({ pick: (id) => this.assign(id), selected: () => this.queue.given.get(this.current?.id ?? -1) });
    this.looks = h("div", { class: "looks" });
    this.nearest = h("div", { class: "nearest" });
    this.why = h("p", { class: "why" });
    this.progress = h("div", { class: "progress-note" });
    this.foot = h("footer", { class: "foot" }, h("div", { class: "evidence" }, this.looks, this.nearest),
      keyline([["Space", "accept"], ["1–9", "label"], ["X", "none of these"], ["U", "undo"], ["←", "back"], ["→", "skip"]]));
    this.stage = h("div", { class: "stage" }, this.picture.element, this.foot);
    this.message = h("div", { class: "stage", hidden: true });
    this.element = h("div", { class: "bench" }, this.stage, this.message, h("aside", { class: "side" }, this.panel.element, this.why, this.progress));
    this.draw();
    void this.fetch();
  }

  get current() {
    return this.queue.ahead[0];
  }

  async fetch() {
    try {
      await this.queue.refill();
      this.draw();
    } catch (error) {
      complain(error);
    }
  }

  /** @param {number|null} classId @param {number} [start] */
  assign(classId, start) {
    const item = this.current;
    if (!item) return;
    this.queue.leave(classId);
    this.draw(start);
    save("/api/label", { image: item.id, class: classId, source: "queue" })
      .then((answer) => this.queue.merge(answer.next))
      .then(() => (this.queue.ahead.length < AHEAD ? this.queue.refill() : undefined))
      .catch((error) => {
        this.queue.restore([item.id]);
        complain(error);
      })
      .finally(() => this.draw());
  }

  accept(/** @type {number} */ start) {
    const best = this.current?.suggestions[0];
    if (best) this.assign(best.class, start);
    else say(classes().length ? "No suggestion yet: press the number of the class." : "Name a class first: type it and press Enter.");
  }

  async undo() {
    try {
      const { undone, next } = await save("/api/undo", {}, { repeat: false });
      this.queue.restore(undone?.images ?? []);
      this.queue.merge(next);
      this.draw();
      sayUndone(undone);
    } catch (error) {
      complain(error);
    }
  }

  skip(/** @type {number} */ start) {
    this.queue.leave();
    this.draw(start);
    if (this.queue.ahead.length < AHEAD) void this.fetch();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const chosen = classOfKey(event.key);
    const key = event.key.toLowerCase();
    if (chosen) this.assign(chosen.id, event.timeStamp);
    else if (key === " ") this.accept(event.timeStamp);
    else if (key === "x") this.assign(null, event.timeStamp);
    else if (key === "u") void this.undo();
    else if (key === "z") this.picture.zoom();
    else if (key === "arrowright") this.skip(event.timeStamp);
    else if (key === "arrowleft") this.queue.back() && this.draw(event.timeStamp);
    else if (key === "/") this.panel.search("");
    else if (isLetter(event)) this.panel.search(event.key);
    else return false;
    return true;
  }

  /** @param {number} [start] */
  draw(start) {
    const item = this.current;
    this.stage.hidden = !item;
    this.message.hidden = Boolean(item);
    this.unpainted = start === undefined ? undefined : item;
    if (!item) return this.drawEmpty();
    this.picture.show(item, this.queue.ahead.slice(1, AHEAD).map((one) => one.id), start);
    if (start === undefined) return this.update();
    afterPaint(() => {
      if (this.unpainted !== item) return;
      this.unpainted = undefined;
      this.update();
    });
  }

  /** @param {Item} item */
  drawEvidence(item) {
    const given = this.queue.given.get(item.id);
    const best = item.suggestions.slice(0, 3);
    if (given !== undefined) renew(this.looks, h("span", { class: "lead-in" }, "labeled"), chip(given));
    else if (best.length) renew(this.looks, h("span", { class: "lead-in" }, "looks like"), ...best.map(({ class: id, p }, k) =>
      h("button", { type: "button", class: k ? "guess" : "guess first", onclick: () => this.assign(id) }, chip(id), h("b", {}, percent(p)))));
    else renew(this.looks, h("span", { class: "lead-in" }, suggestionsNeed()));
    const near = item.nearest.slice(0, 5);
    renew(this.nearest, near.length > 0 && h("span", { class: "lead-in" }, "nearest labeled"),
      ...near.map(({ id, class: of }) => h("figure", { class: "tiny", title: className(of) }, h("img", { src: thumbnail(id), alt: "", draggable: "false" }), h("figcaption", {}, chip(of)))));
    this.why.hidden = false;
    renew(this.why, h("span", { class: "lead-in" }, "why this image"), item.why);
  }

  drawEmpty() {
    this.picture.clear();
    this.why.hidden = true;
    const skipped = this.queue.skipped.size;
    if (this.queue.left > skipped) return replace(this.message, h("p", { class: "loading" }, "Choosing the next images…"));
    const again = h("button", { onclick: () => { this.queue.skipped.clear(); void this.fetch(); } }, `Show the ${plural(skipped, "skipped image")} again`);
    replace(this.message, skipped
      ? empty("Only skipped images are left", "Every other image has a label.", again)
      : empty("Every image has a label", "Look at the doubtful ones in Review, measure the accuracy in Audit, or train a classifier.", h("a", { class: "button", href: "#review" }, "Review"), h("a", { class: "button", href: "#train" }, "Train")));
  }

  update() {
    if (this.unpainted) return; // the image first
    this.panel.update();
    const { done, total } = /** @type {import("./state.js").State} */ (store.state).features;
    renew(this.progress, done < total && `${count(done)} of ${count(total)} images are encoded; the order improves as they arrive.`);
    if (this.current) this.drawEvidence(this.current);
    else this.drawEmpty();
    if (!this.refreshing && store.state?.version !== this.version) void this.refresh();
  }

  /** Suggestions are solved again after each label; the answer to that label may be older. */
  async refresh() {
    this.refreshing = true;
    this.version = store.state?.version;
    await this.queue.refresh().catch(() => undefined); // the notice says that the server is away
    this.refreshing = false;
    this.draw();
    if (store.state?.version !== this.version) this.update();
  }
}

function suggestionsNeed() {
  const { features, labels } = /** @type {import("./state.js").State} */ (store.state);
  if (features.error) return `no suggestions: ${features.error}`;
  if (!classes().length) return "type a class name and press Enter";
  if (labels < 2) return "suggestions begin after the first labels";
  if (features.done < features.total) return "suggestions come once the images are encoded";
  return "no suggestion yet";
}

export const label = {
  id: "label",
  title: "Label",
  keys: KEYS,
  mount() {
    const screen = new LabelScreen();
    return { element: screen.element, update: () => screen.update(), key: (/** @type {KeyboardEvent} */ event) => screen.key(event) };
  },
};
