// Line charts, drawn by hand as SVG: few lines, few ticks, the last value in words.
import { h, s } from "./dom.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [420, 190, 44, 12, 10, 24];

/** Three to five round values between two ends. @param {number} low @param {number} high */
function ticks(low, high) {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((one) => one >= rough) ?? rough;
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + 1e-9; value += step) values.push(value);
  return values;
}

/**
 * @param {{title: string, about: string, x: number[], y: (number|null)[], xmax: number, series: number, format: (value: number) => string, share?: boolean}} options
 *   series: colour; share: the axis runs from 0 to 1
 */
export function chart({ title, about, x, y, xmax, series, format, share = false }) {
  const points = x.map((step, k) => [step, y[k]]).filter(([, value]) => typeof value === "number" && Number.isFinite(value));
  const values = points.map(([, value]) => /** @type {number} */ (value));
  const high = share ? 1 : Math.max(1e-6, ...values) * 1.05;
  const across = (/** @type {number} */ value) => LEFT + (value / Math.max(1, xmax)) * (WIDTH - LEFT - RIGHT);
  const up = (/** @type {number} */ value) => HEIGHT - BOTTOM - (value / high) * (HEIGHT - TOP - BOTTOM);
  const last = values.at(-1);
  const path = points.map(([step, value], k) => `${k ? "L" : "M"}${across(/** @type {number} */ (step)).toFixed(1)} ${up(/** @type {number} */ (value)).toFixed(1)}`).join("");
  const drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": last === undefined ? `${title}: nothing measured yet` : `${title}: ${format(last)} at step ${points.at(-1)?.[0]}` },
    ...ticks(0, high).map((value) => [
      s("line", { class: "gridline", x1: LEFT, x2: WIDTH - RIGHT, y1: up(value), y2: up(value) }),
      s("text", { class: "tick", x: LEFT - 6, y: up(value) + 3.5, "text-anchor": "end" }, format(value)),
    ]).flat(),
    ...ticks(0, xmax).map((value) => s("text", { class: "tick", x: across(value), y: HEIGHT - 6, "text-anchor": value === 0 ? "start" : "middle" }, String(Math.round(value)))),
    path && s("path", { class: `line series-${series}`, d: path }),
    last !== undefined && s("circle", { class: `dot series-${series}`, r: 3.5, cx: across(/** @type {number} */ (points.at(-1)?.[0])), cy: up(last) }));
  return h("figure", { class: "chart" }, h("figcaption", {}, h("strong", {}, title, h("b", {}, last === undefined ? "" : format(last))), about), drawing);
}
