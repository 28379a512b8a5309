// Export: what you get, how good it was measured to be, and the command that does the same.
import { get, post } from "./api.js";
import { complain, say } from "./dialog.js";
import { empty, h, percent, plural, replace } from "./dom.js";
import { store } from "./state.js";

/** @typedef {{labels: number, formats: {format: string, ok: boolean, why: string}[], commands: Record<string, string>}} Offer */

const GOODS = [
  ["csv", "Labels as a table", "A CSV file with the columns path and label: the input of finessl quick and finessl train.", "quick", "Write the table"],
  ["folders", "Labels as folders", "A folder per class with copies of its images.", "", "Copy into folders"],
  ["classifier", "The classifier", "The trained model, or one from frozen features, with its preprocessing.", "export", "Write the classifier"],
  ["report", "The report", "One HTML file that says in plain words how far to trust the classifier.", "report", "Write the report"],
];
const CLASSIFIERS = ["onnx", "pt2", "timm", "adapter"];
const FORMATS = /** @type {Record<string, string>} */ ({ timm: "a folder that timm.create_model opens", onnx: "for onnxruntime, without Python if need be", pt2: "for torch.export.load", adapter: "the tuned weights alone" });

class ExportScreen {
  constructor() {
    this.cards = h("div", { class: "cards" }, h("p", { class: "loading" }, "Looking what there is…"));
    this.measured = h("p", { class: "measured" });
    this.format = h("select", { "aria-label": "Format" });
    this.element = h("div", { class: "page export" },
      h("header", { class: "page-head" }, h("p", { class: "eyebrow" }, "Export"), h("h1", {}, "Take it with you"), this.measured), this.cards);
    void this.open();
  }

  async open() {
    try {
      this.draw(await get("/api/export"));
    } catch (error) {
      replace(this.cards, empty("The list did not arrive", error instanceof Error ? error.message : "", h("button", { onclick: () => void this.open() }, "Try again")));
    }
  }

  /** @param {Offer} offer */
  draw(offer) {
    const formats = offer.formats.filter(({ format }) => CLASSIFIERS.includes(format));
    replace(this.format, ...formats.map(({ format, ok }) => h("option", { value: format, disabled: !ok }, FORMATS[format] ? `${format}: ${FORMATS[format]}` : format)));
    const first = formats.find(({ ok }) => ok);
    if (first) this.format.value = first.format;
    replace(this.cards, ...GOODS.map((goods) => this.card(goods, offer)));
  }

  /** Why something cannot be exported yet, or "". @param {string} what @param {Offer} offer */
  hindrance(what, offer) {
    const ways = offer.formats.filter(({ format }) => (what === "classifier" ? CLASSIFIERS.includes(format) : format === what));
    return ways.some(({ ok }) => ok) ? "" : ways[0]?.why || "This is not possible yet.";
  }

  /** @param {string[]} goods @param {Offer} offer */
  card([what, title, text, use, action], offer) {
    const hindrance = this.hindrance(what, offer);
    const result = h("div", { class: "result", "aria-live": "polite" });
    const button = h("button", { type: "button", disabled: hindrance !== "" }, action);
    button.addEventListener("click", () => void this.write(what, button, result));
    const refused = what === "classifier" ? offer.formats.filter(({ format, ok, why }) => CLASSIFIERS.includes(format) && !ok && why) : [];
    return h("section", { class: "card", "data-what": what }, h("h2", {}, title), h("p", { class: "quiet" }, text),
      hindrance && h("p", { class: "hindrance" }, hindrance),
      !hindrance && refused.length > 0 && h("details", {}, h("summary", {}, `${plural(refused.length, "format")} not possible`), ...refused.map(({ format, why }) => h("p", { class: "quiet" }, `${format}: ${why}`))),
      h("div", { class: "actions" }, what === "classifier" && !hindrance && this.format, button), result, offer.commands[use] && command(offer.commands[use]));
  }

  /** @param {string} what @param {HTMLButtonElement} button @param {HTMLElement} result */
  async write(what, button, result) {
    const action = button.textContent;
    button.disabled = true;
    button.textContent = "Writing…";
    try {
      const { path, command: line } = await post("/api/export", { what, ...(what === "classifier" && { format: this.format.value }) });
      replace(result, h("p", {}, "Written: ", h("span", { class: "path" }, path)));
      const card = result.closest(".card");
      card?.querySelector(".command")?.remove();
      if (line) card?.append(command(line));
    } catch (error) {
      complain(error);
    }
    button.disabled = false;
    button.textContent = action;
  }

  update() {
    const { accuracy, labels } = /** @type {import("./state.js").State} */ (store.state);
    this.measured.textContent = accuracy.kind
      ? `${plural(labels, "label")}. The classifier is right for ${percent(accuracy.value)} of the images (${accuracy.kind}, ${percent(accuracy.low)} to ${percent(accuracy.high)}, n = ${accuracy.n}).`
      : `${plural(labels, "label")}. How good the classifier is has not been measured: an audit of twenty images gives a first figure.`;
  }
}

/** A command line to copy. @param {string} line */
function command(line) {
  const code = h("code", {}, ...line.split(" ").flatMap((word, k) => [k ? " " : "", h("span", {}, word)])); // lines break between words
  const copy = h("button", { type: "button", class: "plain", onclick: async () => {
    try {
      await navigator.clipboard.writeText(code.textContent ?? "");
      say("Copied.");
    } catch {
      getSelection()?.selectAllChildren(code); // no clipboard outside localhost: the text is selected instead
    }
  } }, "Copy");
  return h("div", { class: "command" }, h("p", { class: "lead-in" }, "from a terminal", copy), h("pre", {}, code));
}

export const exportScreen = {
  id: "export",
  title: "Export",
  keys: [],
  mount() {
    const screen = new ExportScreen();
    return { element: screen.element, update: () => screen.update() };
  },
};
