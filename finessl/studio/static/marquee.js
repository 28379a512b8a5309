// Drag over cells to mark them. A finger scrolls instead.
import { h } from "./dom.js";

const THRESHOLD = 6; // pixels before a press becomes a drag

/**
 * @param {HTMLElement} grid a scrolling element with `.cell`s that carry `data-index`
 * @param {(indices: number[]) => void} select
 */
export function dragSelect(grid, select) {
  const frame = h("div", { class: "marquee", hidden: true });
  grid.append(frame);
  /** @type {{x: number, y: number}|null} */
  let from = null;
  let dragged = false;

  const point = (/** @type {MouseEvent} */ event) => {
    const box = grid.getBoundingClientRect();
    return { x: event.clientX - box.left + grid.scrollLeft, y: event.clientY - box.top + grid.scrollTop };
  };

  grid.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button !== 0) return;
    from = point(event);
    dragged = false;
  });
  grid.addEventListener("pointermove", (event) => {
    if (!from) return;
    const to = point(event);
    if (!dragged && Math.hypot(to.x - from.x, to.y - from.y) < THRESHOLD) return;
    if (!dragged) grid.setPointerCapture(event.pointerId);
    dragged = true;
    frame.hidden = false;
    frame.style.transform = `translate(${Math.min(from.x, to.x)}px, ${Math.min(from.y, to.y)}px)`;
    frame.style.width = `${Math.abs(to.x - from.x)}px`;
    frame.style.height = `${Math.abs(to.y - from.y)}px`;
  });
  const end = () => {
    if (dragged) {
      const box = frame.getBoundingClientRect();
      const inside = [...grid.querySelectorAll(".cell")].filter((cell) => {
        const one = cell.getBoundingClientRect();
        return one.left < box.right && one.right > box.left && one.top < box.bottom && one.bottom > box.top;
      });
      select(inside.map((cell) => Number(/** @type {HTMLElement} */ (cell).dataset.index)));
    }
    from = null;
    frame.hidden = true;
  };
  grid.addEventListener("pointerup", end);
  grid.addEventListener("pointercancel", end);
  // The click that ends a drag marks nothing more.
  grid.addEventListener("click", (event) => {
    if (dragged) event.stopImmediatePropagation();
    dragged = false;
  }, { capture: true });
}
