// A grid of any length: only the cells in view exist, pages of items are fetched as they come into view.
import { h } from "./dom.js";

const PAGE = 120; // items per request
const OVERSCAN = 3; // rows above and below the view, loaded before they are seen
const TALLEST = 12_000_000; // pixels; browsers cut off taller elements

/**
 * @template {{id: number}} T
 */
export class Grid {
  /**
   * @param {{load: (offset: number, limit: number, signal: AbortSignal) => Promise<{total: number, items: T[]}>,
   *   draw: (cell: HTMLElement, item: T|undefined, index: number) => void, settled?: () => void, failed?: (error: unknown) => void, size?: number}} options
   */
  constructor({ load, draw, settled = () => {}, failed = () => {}, size = 150 }) {
    this.load = load;
    this.draw = draw;
    this.settled = settled;
    this.failed = failed;
    this.size = size;
    this.total = 0;
    this.columns = 1;
    /** @type {Map<number, T>} */
    this.items = new Map();
    /** @type {Map<number, AbortController>} */
    this.pages = new Map();
    /** @type {Map<number, HTMLElement>} */
    this.cells = new Map();
    this.space = h("div", { class: "grid-space" });
    this.element = h("div", { class: "grid", role: "listbox", "aria-multiselectable": "true", tabindex: "0", "aria-label": "Images", onscroll: () => this.schedule() }, this.space);
    this.timer = 0;
    this.frame = 0;
    this.watcher = new ResizeObserver(() => this.layout());
    this.watcher.observe(this.element);
  }

  /** Forgets everything and asks from the top. @returns {Promise<void>} */
  async reset() {
    this.drop();
    this.items.clear();
    this.total = 0;
    this.element.scrollTop = 0;
    await this.fetchPage(0);
    this.layout();
  }

  drop() {
    for (const request of this.pages.values()) request.abort();
    this.pages.clear();
    for (const cell of this.cells.values()) cell.remove();
    this.cells.clear();
  }

  destroy() {
    this.drop();
    this.watcher.disconnect();
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
  }

  /** @param {number} size pixels of a cell's side */
  resize(size) {
    const first = Math.floor(this.top / this.step) * this.columns;
    this.size = size;
    this.layout();
    this.reveal(first);
  }

  get step() {
    return this.side;
  }

  get rows() {
    return Math.ceil(this.total / this.columns);
  }

  /** How far the list is scrolled, in the pixels of its full height. */
  get top() {
    return this.element.scrollTop * this.stretch;
  }

  layout() {
    const width = this.element.clientWidth;
    this.columns = Math.max(1, Math.round(width / this.size));
    this.side = width / this.columns;
    const full = this.rows * this.side;
    const height = Math.min(full, TALLEST);
    const view = this.element.clientHeight;
    this.stretch = height > view && full > height ? (full - view) / (height - view) : 1;
    this.space.style.height = `${height}px`;
    this.paint();
    this.rest();
  }

  schedule() {
    if (!this.frame)
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.paint();
      });
    this.rest();
  }

  /** When scrolling rests, what is in view has been seen. */
  rest() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.settled(), 120);
  }

  /** @returns {[number, number]} first index and end of the rows of which most is in view */
  inView() {
    const first = Math.max(0, Math.round(this.top / this.side));
    const last = Math.round((this.top + this.element.clientHeight) / this.side);
    return [first * this.columns, Math.min(this.total, last * this.columns)];
  }

  /** Whether a part of a cell is in view. @param {HTMLElement} content of the cell */
  shows(content) {
    const [first, last] = this.range(0);
    const index = Number(content.parentElement?.dataset.index);
    return index >= first && index < last;
  }

  /** @param {number} extra rows @returns {[number, number]} first index and end of what is in view, with some rows more */
  range(extra) {
    const first = Math.max(0, Math.floor(this.top / this.side) - extra);
    const last = Math.ceil((this.top + this.element.clientHeight) / this.side) + extra;
    return [first * this.columns, Math.min(this.total, last * this.columns)];
  }

  paint() {
    if (!this.side || !this.element.isConnected) return;
    const [first, last] = this.range(OVERSCAN);
    /** @type {HTMLElement[]} */
    const free = [];
    for (const [index, cell] of this.cells)
      if (index < first || index >= last) {
        free.push(cell);
        this.cells.delete(index);
      }
    const shift = this.element.scrollTop - this.top; // 0 unless the list is taller than a browser allows
    const [top, bottom] = this.range(0);
    const indices = Array.from({ length: last - first }, (_, k) => first + k);
    const seen = (/** @type {number} */ index) => index >= top && index < bottom;
    for (const index of [...indices.filter(seen), ...indices.filter((one) => !seen(one))]) { // what is in view is loaded first
      let cell = this.cells.get(index);
      if (!cell) {
        cell = free.pop() ?? this.space.appendChild(h("div", { class: "cell", role: "option" }));
        this.cells.set(index, cell);
        cell.dataset.index = String(index);
        this.draw(cell, this.items.get(index), index);
      }
      const x = (index % this.columns) * this.side;
      const y = Math.floor(index / this.columns) * this.side + shift;
      cell.style.transform = `translate(${x}px, ${y}px)`;
      cell.style.width = cell.style.height = `${this.side}px`;
    }
    for (const cell of free) cell.remove();
    this.fetchView(Math.max(0, first - PAGE / 2), Math.min(this.total, last + PAGE));
  }

  /** @param {number} first @param {number} last */
  fetchView(first, last) {
    const [from, to] = [Math.floor(first / PAGE), Math.floor(Math.max(first, last - 1) / PAGE)];
    for (const [page, request] of this.pages)
      if ((page < from || page > to) && !this.items.has(page * PAGE)) {
        request.abort(); // it left the view before it arrived
        this.pages.delete(page);
      }
    const centre = Math.floor(this.range(0)[0] / PAGE); // what is in view is asked for first
    const wanted = Array.from({ length: to - from + 1 }, (_, k) => from + k).sort((a, b) => Math.abs(a - centre) - Math.abs(b - centre));
    for (const page of wanted) if (!this.pages.has(page) && page * PAGE < this.total) void this.fetchPage(page);
  }

  /** @param {number} page */
  async fetchPage(page) {
    const request = new AbortController();
    this.pages.set(page, request);
    try {
      const { total, items } = await this.load(page * PAGE, PAGE, request.signal);
      if (request.signal.aborted) return;
      items.forEach((item, k) => this.items.set(page * PAGE + k, item));
      const changed = total !== this.total;
      this.total = total;
      if (changed) this.layout();
      this.redraw();
      this.rest();
    } catch (error) {
      this.pages.delete(page);
      if (!request.signal.aborted) this.failed(error);
    }
  }

  redraw() {
    for (const [index, cell] of this.cells) this.draw(cell, this.items.get(index), index);
  }

  /** Scrolls until a cell is in view. @param {number} index */
  reveal(index) {
    const y = Math.floor(index / this.columns) * this.side;
    const view = this.element.clientHeight;
    const top = y < this.top ? y : y + this.side > this.top + view ? y + this.side - view : null;
    if (top !== null) this.element.scrollTop = top / this.stretch;
    this.paint();
  }
}
