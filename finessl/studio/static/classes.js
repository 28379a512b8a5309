// Classes: their marks, and the column that lists, finds, adds, renames, merges and splits them.
import { post } from "./api.js";
import * as dialog from "./dialog.js";
import { count, h, keycap, percent, plural, renew } from "./dom.js";
import { classById, className, classes, store, update } from "./state.js";

const COLOURS = 7; // as in theme.css; beyond them the shape changes
const SHAPES = 4;

/** A class's mark: one of seven colours and four shapes, by its id, so that it never changes. Its name always goes with it.
 * @param {number} id */
export const mark = (id) =>
  h("i", { class: `mark colour-${id % COLOURS} shape-${Math.floor(id / COLOURS) % SHAPES}`, "aria-hidden": "true" });

/** @param {number|null|undefined|"none"} id @param {...any} more */
export const chip = (id, ...more) =>
  h("span", { class: "chip" }, typeof id === "number" ? mark(id) : h("i", { class: "mark no-class" }), h("span", { class: "chip-name" }, className(id)), ...more);

/** @param {string} name @returns {Promise<import("./state.js").Class|undefined>} */
export async function addClass(name) {
  const state = await post("/api/classes", { add: name.trim() });
  update({ state });
  return classes().find((one) => one.name === name.trim());
}

export class ClassPanel {
  /**
   * @param {{pick: (id: number|null, typed?: boolean) => void, other?: "none"|"all"|"", selected?: () => number|null|undefined,
   *   adding?: boolean, label?: string, done?: () => void}} options pick: typed: by its name.   other: the row that picks null.   done: Enter in the empty field
   */
  constructor({ pick, other = "none", selected = () => undefined, adding = true, label = "Classes", done = () => {} }) {
    Object.assign(this, { pick, other, selected, adding, done });
    this.choice = 0;
    this.input = h("input", {
      type: "text", placeholder: adding ? "Find or add a class" : "Find a class", "aria-label": adding ? "Find or add a class" : "Find a class",
      autocomplete: "off", spellcheck: "false", maxlength: "100",
      oninput: () => { this.choice = 0; this.update(); },
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.typed(event),
    });
    this.list = h("ul", { class: "classes" });
    this.element = h("section", { class: "class-panel", "aria-label": label }, h("div", { class: "column-heads", "aria-hidden": "true" }, h("span", {}, "doubt"), h("span", {}, "labels")), this.list, h("div", { class: "find" }, this.input, keycap("/")));
    this.update();
  }

  /** The classes that the text in the field leaves, best first, and whether it could be a new one. */
  matches() {
    const text = this.input.value.trim().toLocaleLowerCase();
    const all = classes();
    if (!text) return { found: all, fresh: "" };
    const found = all
      .filter((one) => one.name.toLocaleLowerCase().includes(text))
      .sort((a, b) => Number(!a.name.toLocaleLowerCase().startsWith(text)) - Number(!b.name.toLocaleLowerCase().startsWith(text)));
    const known = all.some((one) => one.name.toLocaleLowerCase() === text);
    return { found, fresh: this.adding && !known ? this.input.value.trim() : "" };
  }

  update() {
    const { found, fresh } = this.matches();
    const searching = this.input.value.trim() !== "";
    const rows = found.map((one, position) => this.row(one, searching && position === this.choice));
    if (fresh) {
      const active = searching && this.choice >= found.length;
      rows.push(h("li", {}, h("button", { type: "button", class: active ? "class-row active" : "class-row", onclick: () => this.add(fresh) },
        h("span", { class: "keycap" }, "+"), h("span", { class: "class-name" }, `Add “${fresh}”`))));
    }
    if (this.other && !searching) rows.push(this.otherRow());
    renew(this.list, ...rows);
  }

  /** @param {import("./state.js").Class} one @param {boolean} active */
  row(one, active) {
    const position = classes().indexOf(one) + 1;
    const uncertain = Math.round(100 * Math.min(1, one.uncertain ?? 0));
    const bar = h("span", { class: "uncertain", title: `Images that look like it are ${percent(one.uncertain ?? 0)} uncertain on average` }, h("i", {}));
    bar.firstChild.style.width = `${uncertain}%`;
    return h("li", { class: this.selected() === one.id ? "selected" : undefined, "data-class": String(one.id) },
      h("button", { type: "button", class: active ? "class-row active" : "class-row", "aria-pressed": String(this.selected() === one.id), onclick: () => this.choose(one.id) },
        h("span", { class: "keycap" }, position <= 9 ? String(position) : "·"), mark(one.id),
        h("span", { class: "class-name", title: one.name }, one.name), bar, h("span", { class: "class-count", title: plural(one.labels, "label") }, count(one.labels))),
      this.adding && h("button", { type: "button", class: "plain edit", "aria-label": `Rename, merge or split ${one.name}`, onclick: () => editClass(one.id) }, "⋯"));
  }

  otherRow() {
    const all = this.other === "all";
    const number = (all ? store.state?.project.images : store.state?.none) ?? 0;
    return h("li", { class: this.selected() === null ? "selected" : undefined },
      h("button", { type: "button", class: "class-row none", onclick: () => this.choose(null) }, h("span", { class: "keycap" }, all ? "0" : "X"),
        h("i", { class: "mark no-class" }), h("span", { class: "class-name" }, all ? "all images" : "none of these"), h("span", { class: "class-count" }, count(number))));
  }

  /** @param {number|null} id @param {boolean} [typed] */
  choose(id, typed = false) {
    this.clear();
    this.pick(id, typed);
  }

  /** @param {string} name */
  async add(name) {
    this.clear();
    try {
      const added = await addClass(name);
      if (added) this.pick(added.id, true);
    } catch (error) {
      dialog.complain(error);
    }
  }

  clear() {
    this.input.value = "";
    this.choice = 0;
    if (document.activeElement === this.input) this.input.blur();
    this.update();
  }

  /** Starts the search with a letter that was typed elsewhere. @param {string} letter */
  search(letter) {
    this.input.focus();
    this.input.value = letter;
    this.choice = 0;
    this.update();
  }

  /** @param {KeyboardEvent} event */
  typed(event) {
    const { found, fresh } = this.matches();
    const last = found.length + (fresh ? 1 : 0) - 1;
    if (event.key === "Escape") this.clear();
    else if (event.key === "ArrowDown") this.choice = Math.min(last, this.choice + 1);
    else if (event.key === "ArrowUp") this.choice = Math.max(0, this.choice - 1);
    else if (event.key === "Enter" && this.input.value.trim() && last >= 0) {
      if (this.choice < found.length) this.choose(found[this.choice].id, true);
      else void this.add(fresh);
    } else if (event.key === "Enter" && !this.input.value.trim()) {
      this.input.blur();
      this.done();
    } else return;
    event.preventDefault();
    this.update();
  }
}

/** Its labeled images in Sort. @param {number} id */
function split(id) {
  dialog.close();
  update({ wall: { id, label: "yes" } });
  location.hash = "sort";
}

/** @param {number} id */
function editClass(id) {
  const one = classById(id);
  if (!one) return;
  const name = h("input", { type: "text", value: one.name, maxlength: "100", "aria-label": "New name", spellcheck: "false" });
  const others = classes().filter((other) => other.id !== id);
  const target = h("select", { "aria-label": "Merge into" }, ...others.map((other) => h("option", { value: other.id }, other.name)));
  const send = async (/** @type {Event} */ event, /** @type {object} */ body, /** @type {string} */ done) => {
    event.preventDefault();
    try {
      update({ state: await post("/api/classes", body) });
      dialog.close();
      dialog.say(done);
    } catch (error) {
      dialog.complain(error);
    }
  };
  dialog.open(
    one.name,
    h("form", { class: "row", onsubmit: (/** @type {Event} */ event) => send(event, { rename: id, name: name.value.trim() }, `Renamed to ${name.value.trim()}.`) },
      name, h("button", { class: "primary" }, "Rename")),
    others.length > 0 && h("h3", {}, "Merge into another class"),
    others.length > 0 && h("p", { class: "quiet" }, `${plural(one.labels, "label")} of ${one.name} become labels of the other class, for good.`),
    others.length > 0 && h("form", { class: "row", onsubmit: (/** @type {Event} */ event) => send(event, { merge: id, into: Number(target.value) }, `${one.name} is merged.`) },
      target, h("button", {}, "Merge")),
    one.labels > 1 && h("h3", {}, "Split off a new class"),
    one.labels > 1 && h("p", { class: "quiet" }, "Mark its images in Sort, type the name of the new class and press Enter."),
    one.labels > 1 && h("button", { type: "button", onclick: () => split(id) }, `Show the ${plural(one.labels, "label")}`),
  );
  name.select();
}
