// Audit: random images, the prediction hidden until you have answered. The figure grows sharper with each answer.
import { get, save } from "./api.js";
import { chip, ClassPanel } from "./classes.js";
import { complain, sayUndone } from "./dialog.js";
import { empty, h, keyline, percent, plural, replace } from "./dom.js";
import { isLetter } from "./keys.js";
import { Picture } from "./picture.js";
import { classes, classOfKey, store, thumbnail } from "./state.js";

const KEYS = [["1 … 9", "what you see"], ["X", "none of these classes"], ["U", "undo"], ["Z", "zoom"], ["/", "find a class; other letters start at once"]];
const REMEMBERED = 8; // answers shown below the figure
const ENOUGH = 10; // answers for a first figure

class AuditScreen {
  constructor() {
    /** @type {{id: number, name: string}|null} */
    this.image = null;
    this.answered = 0;
    /** @type {import("./state.js").Accuracy|null} */
    this.accuracy = null;
    /** @type {{id: number, given: number|null, predicted: number|null, right: boolean|null}[]} */
    this.before = [];
    this.loading = true;
    this.waiting = false;
    this.picture = new Picture();
    this.panel = new ClassPanel({ pick: (id) => void this.answer(id), adding: false });
    this.figure = h("section", { class: "audit-figure" });
    this.history = h("ol", { class: "audit-history", "aria-label": "Your last answers" });
    this.stage = h("div", { class: "stage" }, this.picture.element,
      h("footer", { class: "foot" }, h("div", { class: "evidence" }, h("span", { class: "lead-in" }, "What is it?"), h("span", { class: "quiet" }, "The prediction stays hidden until you answer, so that it cannot sway you.")),
        keyline([["1–9", "what you see"], ["X", "none of these"], ["U", "undo"], ["Z", "zoom"]])));
    this.message = h("div", { class: "stage" });
    this.element = h("div", { class: "bench audit" }, this.stage, this.message, h("aside", { class: "side" }, this.figure, this.panel.element, this.history));
    this.draw();
    void this.open();
  }

  /** Another tab may have answered, or the classifier has come. */
  update() {
    if (!this.loading && !this.waiting && store.state?.version !== this.version) void this.open();
    else this.panel.update();
  }

  async open() {
    this.version = store.state?.version;
    const shown = this.image;
    try {
      const found = await get("/api/audit");
      if (this.waiting || this.image !== shown) return; // answered meanwhile
      this.take(found);
      this.failure = null;
    } catch (error) {
      this.failure = error instanceof Error ? error.message : String(error);
    }
    this.loading = false;
    this.draw();
  }

  /** @param {{image?: any, next?: any, answered: number, accuracy: any}} answer */
  take(answer) {
    this.image = answer.image ?? answer.next ?? null;
    this.answered = answer.answered;
    this.accuracy = answer.accuracy;
  }

  /** @param {number|null} classId @param {number} [start] */
  async answer(classId, start) {
    const image = this.image;
    if (!image || this.waiting) return;
    this.waiting = true;
    try {
      const answer = await save("/api/audit", { image: image.id, class: classId });
      this.before.unshift({ id: image.id, given: classId, predicted: answer.predicted, right: answer.right });
      this.before.length = Math.min(this.before.length, REMEMBERED);
      this.take({ ...answer, image: answer.next });
    } catch (error) {
      complain(error);
    }
    this.waiting = false;
    this.draw(start);
  }

  async undo() {
    try {
      const { undone } = await save("/api/undo", {}, { repeat: false });
      sayUndone(undone);
      this.before = this.before.filter(({ id }) => !undone?.images.includes(id));
      await this.open();
    } catch (error) {
      complain(error);
    }
  }

  /** @param {number} [start] */
  draw(start) {
    const ready = this.image && classes().length > 1;
    this.stage.hidden = !ready;
    this.message.hidden = Boolean(ready);
    if (this.image && ready) this.picture.show(this.image, [], start);
    else this.drawEmpty();
    this.drawFigure();
    replace(this.history, ...this.before.map((one) => h("li", { class: one.right ? "right" : "not-right" },
      h("img", { src: thumbnail(one.id), alt: "" }), h("span", { class: "judgement" }, one.right === null ? "–" : one.right ? "✓ right" : "✕ wrong"),
      one.right ? chip(one.given) : h("span", {}, chip(one.given), h("small", {}, "predicted ", chip(one.predicted))))));
    this.panel.update();
  }

  drawFigure() {
    const known = this.accuracy?.kind === "audited" ? this.accuracy : null;
    const hope = this.answered < ENOUGH ? "Ten give a first figure, a hundred a good one." : "The figure comes with the first suggestions.";
    if (!known) return replace(this.figure, h("p", { class: "figure unknown" }, String(this.answered)), h("p", { class: "quiet" }, `${this.answered === 1 ? "answer" : "answers"} so far. ${hope}`));
    const gauge = h("div", { class: "gauge", role: "img", "aria-label": `between ${percent(known.low)} and ${percent(known.high)}` }, h("i", {}), h("b", {}));
    gauge.children[0].style.left = `${100 * known.low}%`;
    gauge.children[0].style.right = `${100 * (1 - known.high)}%`;
    gauge.children[1].style.left = `${100 * known.value}%`;
    replace(this.figure, h("p", { class: "figure" }, percent(known.value)), gauge,
      h("p", { class: "quiet" }, `${percent(known.low)} to ${percent(known.high)} with 95 % confidence, from ${plural(known.n, "audited image")}.`));
  }

  drawEmpty() {
    this.picture.clear();
    if (this.loading) return replace(this.message, h("p", { class: "loading" }, "Drawing a random image…"));
    if (this.failure) return replace(this.message, empty("No audit yet", this.failure, h("a", { class: "button primary", href: "#label" }, "Label")));
    if (classes().length < 2) return replace(this.message, empty("No audit yet", "An audit compares your answers with predictions: name the classes and label a few images of each first.", h("a", { class: "button primary", href: "#label" }, "Label")));
    replace(this.message, this.answered
      ? empty("Every image is judged", "There is nothing left to draw from: the accuracy is measured on all of them.", h("a", { class: "button", href: "#export" }, "Export"))
      : empty("No audit yet", "There is no prediction to judge: label a few images of each class first.", h("a", { class: "button primary", href: "#label" }, "Label")));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const chosen = classOfKey(event.key);
    const key = event.key.toLowerCase();
    if (chosen) void this.answer(chosen.id, event.timeStamp);
    else if (key === "x") void this.answer(null, event.timeStamp);
    else if (key === "u") void this.undo();
    else if (key === "z") this.picture.zoom();
    else if (key === "/") this.panel.search("");
    else if (isLetter(event)) this.panel.search(event.key);
    else return false;
    return true;
  }
}

export const audit = {
  id: "audit",
  title: "Audit",
  keys: KEYS,
  mount() {
    const screen = new AuditScreen();
    return { element: screen.element, update: () => screen.update(), key: (/** @type {KeyboardEvent} */ event) => screen.key(event) };
  },
};
