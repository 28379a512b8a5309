// Review: labels and predictions worth a second look, each with its reason and its neighbours; one key settles one.
import { get, save } from "./api.js";
import { chip, ClassPanel } from "./classes.js";
import { complain, sayUndone } from "./dialog.js";
import { count, empty, h, keycap, keyline, percent, replace } from "./dom.js";
import { isLetter } from "./keys.js";
import { Picture } from "./picture.js";
import { className, classOfKey, store, thumbnail } from "./state.js";

/** @typedef {{id: number, name?: string, label: number|null|"none", predicted: number|null, p: number|null, why: string, nearest: {id: number, class: number}[], pair?: number|null}} Item */

const KINDS = [
  ["doubtful", "Doubtful labels", "Labels that the other labels contradict.", "No label looks doubtful."],
  ["disagree", "Disagreements", "Unlabeled images on which two classifiers are sure of different classes.", "The classifiers agree."],
  ["none", "Of no class", "Images unlike every class.", "Every image looks like one of the classes."],
  ["confused", "Confused pairs", "Two images that look alike and have different labels.", "No two classes are confused."],
];
const KEYS = [
  ["Space", "accept what is proposed"], ["1 … 9", "change to this class"], ["X", "none of these classes"], ["I", "ignore: leave it as it is"], ["← →", "previous, next"], ["U", "undo"], ["Tab", "to the other lists"], ["Z", "zoom"],
];

class ReviewScreen {
  constructor() {
    this.kind = KINDS[0];
    /** @type {Item[]} */
    this.items = [];
    this.at = 0;
    this.loading = true;
    this.picture = new Picture();
    this.partner = new Picture();
    this.panel = new ClassPanel({ pick: (id) => this.settle("change", id), selected: () => (this.current?.label === "none" ? null : this.current?.label ?? undefined) });
    this.tabs = h("nav", { class: "tabs", "aria-label": "Lists" });
    this.verdict = h("div", { class: "verdict" });
    this.nearest = h("div", { class: "nearest" });
    this.position = h("span", { class: "quiet" });
    this.accept = h("button", { type: "button", class: "primary", onclick: () => this.settle("accept") });
    this.foot = h("footer", { class: "foot" }, h("div", { class: "evidence" }, this.verdict, this.nearest),
      h("div", { class: "evidence" }, this.accept, h("button", { type: "button", onclick: () => this.settle("ignore") }, "Ignore"), this.position),
      keyline([["Space", "accept"], ["1–9", "change"], ["X", "none of these"], ["I", "ignore"], ["U", "undo"], ["←", "back"], ["→", "next"]]));
    this.pictures = h("div", { class: "pictures" }, this.picture.element, this.partner.element);
    this.message = h("div", { class: "message" });
    this.element = h("div", { class: "bench review" }, h("div", { class: "stage" }, this.tabs, this.pictures, this.message, this.foot), h("aside", { class: "side" }, this.panel.element));
    void this.open(this.kind);
  }

  get current() {
    return /** @type {Item|undefined} */ (this.items[this.at]);
  }

  /** @param {string[]} kind */
  async open(kind) {
    this.kind = kind;
    this.items = [];
    this.at = 0;
    this.loading = true;
    this.version = store.state?.version;
    this.draw();
    try {
      const { items } = await get("/api/review", { kind: kind[0] });
      if (this.kind === kind) this.items = items;
      this.failure = null;
    } catch (error) {
      this.failure = error instanceof Error ? error.message : String(error);
    }
    this.loading = false;
    this.draw();
  }

  /** @param {"accept"|"change"|"ignore"} action @param {number|null} [classId] */
  settle(action, classId) {
    const item = this.current;
    if (!item) return;
    this.items.splice(this.at, 1);
    this.at = Math.min(this.at, Math.max(0, this.items.length - 1));
    this.draw();
    const proposal = action === "accept" ? this.proposal(item) : classId;
    save("/api/review", { image: item.id, action, ...(proposal !== undefined && { class: proposal }) }).catch((error) => {
      this.items.splice(this.at, 0, item);
      this.draw();
      complain(error);
    });
  }

  async undo() {
    try {
      const { undone } = await save("/api/undo", {}, { repeat: false });
      sayUndone(undone);
      await this.open(this.kind);
    } catch (error) {
      complain(error);
    }
  }

  /** @param {number} by */
  browse(by) {
    this.at = Math.max(0, Math.min(this.items.length - 1, this.at + by));
    this.draw();
  }

  draw() {
    replace(this.tabs, ...KINDS.map((kind) => h("button", { type: "button", "aria-pressed": String(kind === this.kind), title: kind[2], onclick: () => void this.open(kind) }, kind[1], kind === this.kind && !this.loading && h("small", {}, count(this.items.length)))));
    this.tabs.querySelector("[aria-pressed=true]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    const item = this.current;
    this.pictures.hidden = this.foot.hidden = !item;
    this.message.hidden = Boolean(item);
    if (item) this.drawItem(item);
    else this.drawEmpty();
    this.panel.update();
  }

  /** @param {Item} item */
  drawItem(item) {
    const next = this.items.slice(this.at + 1, this.at + 3);
    this.picture.show({ id: item.id, name: item.name ?? `image ${item.id}` }, next.map((one) => one.id));
    this.partner.element.hidden = typeof item.pair !== "number";
    if (typeof item.pair === "number") this.partner.show({ id: item.pair, name: "looks like this one" }, next.map((one) => one.pair).filter((id) => typeof id === "number"));
    const paired = typeof item.pair === "number";
    replace(this.verdict, h("p", { class: "reason" }, item.why), h("p", { class: "opinions" },
      item.label !== null && h("span", {}, paired ? "left" : "labeled", chip(item.label)),
      item.predicted !== null && h("span", {}, paired ? "right" : "predicted", chip(item.predicted, !paired && item.p !== null && h("b", {}, percent(item.p))))));
    const near = (item.nearest ?? []).slice(0, 6);
    replace(this.nearest, near.length > 0 && h("span", { class: "lead-in" }, "nearest labeled"), ...near.map(({ id, class: of }) => h("figure", { class: "tiny", title: className(of) }, h("img", { src: thumbnail(id), alt: "" }), h("figcaption", {}, chip(of)))));
    const proposal = this.proposal(item);
    replace(this.accept, proposal === undefined ? `It is ${className(item.label)}` : proposal === null ? "It is none of these" : `It is ${className(proposal)}`, keycap("Space"));
    this.position.textContent = `${this.at + 1} of ${count(this.items.length)}`;
  }

  /** The class that Space gives: null is none of the classes, undefined leaves the label as it is.
   * @param {Item} item @returns {number|null|undefined} */
  proposal(item) {
    if (this.kind[0] === "none") return null;
    return item.label === null ? item.predicted : undefined;
  }

  drawEmpty() {
    this.picture.clear();
    this.partner.clear();
    if (this.loading) return replace(this.message, h("p", { class: "loading" }, "Looking…"));
    if (this.failure) return replace(this.message, empty("This list cannot be made", this.failure, h("button", { onclick: () => void this.open(this.kind) }, "Try again")));
    const few = (store.state?.labels ?? 0) < 4;
    replace(this.message, few
      ? empty("Too few labels to review", "Label a few images of each class first: doubts come from comparing them.", h("a", { class: "button primary", href: "#label" }, "Label"))
      : empty("Nothing to settle here", `${this.kind[3]} Look at the other lists, or measure the accuracy.`, h("a", { class: "button", href: "#audit" }, "Audit")));
  }

  update() {
    this.panel.update();
    if (!this.items.length && !this.loading && store.state?.version !== this.version) void this.open(this.kind); // there may be some now
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const chosen = classOfKey(event.key);
    const key = event.key.toLowerCase();
    if (chosen) this.settle("change", chosen.id);
    else if (key === " ") this.settle("accept");
    else if (key === "x") this.settle("change", null);
    else if (key === "i") this.settle("ignore");
    else if (key === "u") void this.undo();
    else if (key === "z") this.picture.zoom();
    else if (key === "arrowright" || key === "arrowleft") this.browse(key === "arrowright" ? 1 : -1);
    else if (key === "/") this.panel.search("");
    else if (isLetter(event)) this.panel.search(event.key);
    else return false;
    return true;
  }
}

export const review = {
  id: "review",
  title: "Review",
  keys: KEYS,
  mount() {
    const screen = new ReviewScreen();
    return { element: screen.element, update: () => screen.update(), key: (/** @type {KeyboardEvent} */ event) => screen.key(event) };
  },
};
