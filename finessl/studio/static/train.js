// Train: the plan and what it costs before it starts; the curves while it runs. Labeling goes on meanwhile.
import { post } from "./api.js";
import { chart } from "./charts.js";
import { complain } from "./dialog.js";
import { count, duration, empty, h, keycap, percent, plural, replace } from "./dom.js";
import { store, updateTraining } from "./state.js";

const BUDGETS = [["", "as planned"], ["120", "2 minutes"], ["600", "10 minutes"], ["3600", "1 hour"], ["28800", "over night"], ["steps", "a number of steps"]];
const KEYS = [["Enter", "start, or resume"], ["S", "stop"]];

class TrainScreen {
  constructor() {
    this.head = h("section", { class: "train-head" });
    this.budget = h("select", { "aria-label": "Time budget" }, ...BUDGETS.map(([value, text]) => h("option", { value }, text)));
    this.steps = h("input", { type: "number", min: "1", max: "1000000", value: "500", "aria-label": "Steps", hidden: true });
    this.budget.addEventListener("change", () => (this.steps.hidden = this.budget.value !== "steps"));
    this.buttons = h("div", { class: "actions" });
    this.progress = h("section", { class: "train-progress" });
    this.charts = h("div", { class: "charts" });
    this.element = h("div", { class: "page train" }, this.head, this.buttons, this.progress, this.charts);
    this.shape = "";
  }

  update() {
    const state = /** @type {import("./state.js").State} */ (store.state);
    const training = state.training;
    const ready = state.classes.filter((one) => one.labels > 0).length >= 2;
    const shape = JSON.stringify([training.state, training.plan, ready, training.state === "idle" && state.accuracy, training.state === "running" || training.message]);
    if (shape !== this.shape) {
      this.shape = shape; // the buttons are drawn again only when they change: a click must not miss them
      this.drawHead(training, ready, state);
      this.drawButtons(training, ready);
    }
    this.drawProgress(training);
    this.drawCharts(training);
  }

  /** @param {import("./state.js").Training} training @param {boolean} ready @param {import("./state.js").State} state */
  drawHead(training, ready, state) {
    const title = { idle: "Train a classifier", running: "Training", stopped: "Stopped", finished: "Trained", failed: "Training failed" }[training.state] ?? training.state;
    const about = { idle: "Fine-tuning adapts the backbone to these images, labeled and unlabeled. It runs while you label; an audit before and after it says what it has gained.", running: "You can go on labeling, or close this page: it runs on.", stopped: "Nothing is lost: it resumes where it stopped.", finished: "Its suggestions are in Sort and Review; an audit measures it.", failed: "" }[training.state];
    const plan = training.plan;
    const frozen = training.state === "finished" && !plan?.steps;
    const { kind, value } = state.accuracy;
    const heading = frozen ? "Frozen features are the result" : title;
    const below = frozen ? "There was no room for training in this time. More time, or a GPU, changes that." : about;
    replace(this.head, h("header", { class: "page-head" }, h("p", { class: "eyebrow" }, "Train"), h("h1", {}, heading), below && h("p", { class: "quiet" }, below)),
      ["stopped", "finished", "failed"].includes(training.state) && training.message && h("p", { class: training.state === "failed" ? "callout problem" : "callout" }, training.message),
      !ready && training.state === "idle"
        ? empty("Two classes with labels are needed", `There ${state.labels === 1 ? "is" : "are"} ${plural(state.labels, "label")} so far. One label of each class is enough to begin; four or more do much better.`, h("a", { class: "button primary", href: "#label" }, "Label"))
        : plan && h("dl", { class: "facts" },
          fact("backbone", plan.backbone), plan.tuning && fact("tuning", plan.tuning), !frozen && fact("steps", plan.steps ? count(plan.steps) : "chosen to fit the time"), training.state !== "finished" && fact(plan.steps ? "expected time" : "time", plan.seconds ? `about ${duration(plan.seconds)}` : "not known yet"),
          training.state === "idle" && kind && fact("accuracy now", `${percent(value)}, ${kind}`),
          training.state === "idle" && fact("labels", count(state.labels)), training.state === "idle" && fact("unlabeled", count(Math.max(0, state.project.images - state.labels - state.none)))),
      ready && plan?.why && h("p", { class: "plan-why" }, h("span", { class: "lead-in" }, "why "), plan.why));
  }

  /** @param {import("./state.js").Training} training @param {boolean} ready */
  drawButtons(training, ready) {
    const button = (/** @type {string} */ text, /** @type {string} */ action, /** @type {string} */ style, /** @type {string} */ key) =>
      h("button", { type: "button", class: style, onclick: () => void this.act(action) }, text, keycap(key));
    const budget = h("label", { class: "field" }, "time budget", this.budget, this.steps);
    const shown = {
      idle: ready ? [button("Start training", "start", "primary", "↵"), budget] : [],
      running: [button("Stop", "stop", "", "S"), h("a", { class: "button", href: "#label" }, "Go on labeling")],
      stopped: [button("Resume", "resume", "primary", "↵"), button("Start again", "start", "", "A"), budget],
      finished: [h("a", { class: "button primary", href: "#audit" }, "Audit it"), button("Train again with all labels", "start", "", "A"), budget],
      failed: [button("Start again", "start", "primary", "↵"), budget],
    }[training.state] ?? [];
    replace(this.buttons, ...shown);
  }

  /** @param {import("./state.js").Training} training */
  drawProgress(training) {
    if (training.state === "idle" || (training.state === "finished" && !training.steps)) return replace(this.progress);
    const left = training.state === "running" && training.seconds_left ? `, ${duration(training.seconds_left)} left` : "";
    const bar = h("progress", { max: training.steps || 1, value: training.step, "aria-label": "Progress" });
    const running = training.state === "running";
    replace(this.progress, bar, h("p", { class: "quiet" }, running && !training.step ? training.message || "starting: reading the images and the backbone" : running && training.step >= training.steps ? "writing the result" : `step ${count(training.step)} of ${count(training.steps)}${left}`, training.run && h("span", { class: "path" }, training.run)));
  }

  /** @param {import("./state.js").Training} training */
  drawCharts({ curves, steps, state }) {
    if (state === "idle" || !curves?.step) return replace(this.charts);
    const common = { x: curves.step, xmax: steps || curves.step.at(-1) || 1 };
    const all = [
      { title: "Loss", about: "on labeled and unlabeled images together", y: curves.loss, series: 0, format: (/** @type {number} */ value) => value.toFixed(2) },
      { title: "Unlabeled images in use", about: "weighted by how sure the model is of their pseudo-labels", y: curves.used, series: 2, format: percent, share: true },
      { title: "Accuracy", about: "on the test images of this run", y: curves.accuracy, series: 1, format: percent, share: true },
    ];
    replace(this.charts, ...all.filter(({ y }) => y?.some((value) => typeof value === "number")).map((one) => chart({ ...common, ...one })));
  }

  /** @param {string} action */
  async act(action) {
    try {
      const { value } = this.budget;
      const length = value === "steps" ? { steps: Number(this.steps.value) } : value ? { budget: Number(value) } : {};
      updateTraining(await post("/api/train", { action, ...length }));
    } catch (error) {
      complain(error);
    }
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const state = store.state?.training.state;
    const primary = { idle: "start", stopped: "resume", failed: "start" }[state ?? ""];
    const key = event.key.toLowerCase();
    if (key === "enter" && primary && this.buttons.childElementCount) void this.act(primary);
    else if (key === "s" && state === "running") void this.act("stop");
    else if (key === "a" && (state === "stopped" || state === "finished")) void this.act("start");
    else return false;
    return true;
  }
}

/** @param {string} name @param {string} value */
const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

export const train = {
  id: "train",
  title: "Train",
  keys: KEYS,
  mount() {
    const screen = new TrainScreen();
    return { element: screen.element, update: () => screen.update(), key: (/** @type {KeyboardEvent} */ event) => screen.key(event) };
  },
};
