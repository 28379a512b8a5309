// The frame: navigation, the figure at the top right, notices, keys.
import { get, listen } from "./api.js";
import * as dialog from "./dialog.js";
import { empty, h, percent, plural, renew, replace } from "./dom.js";
import { handleKeys } from "./keys.js";
import { store, subscribe, update } from "./state.js";
import { audit } from "./audit.js";
import { exportScreen } from "./export.js";
import { label } from "./label.js";
import { review } from "./review.js";
import { sort } from "./sort.js";
import { start } from "./start.js";
import { train } from "./train.js";

/**
 * @typedef {{element: HTMLElement, update?: () => void, key?: (event: KeyboardEvent) => boolean, leave?: () => void}} Mounted
 * @typedef {{id: string, title: string, keys: string[][], mount: () => Mounted}} Screen
 */

/** @type {Screen[]} */
const SCREENS = [start, label, sort, train, review, audit, exportScreen];
const FRAME_KEYS = [["[ ]", "previous, next screen"], ["?", "these keys"], ["Esc", "close"]];

const $ = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));
/** @type {Screen|null} */
let screen = null;
/** @type {Mounted|null} */
let mounted = null;

function route() {
  if (!store.state) return;
  const wanted = location.hash.slice(1);
  const next = SCREENS.find((one) => one.id === wanted) ?? screen ?? (store.state.classes.length ? label : start);
  if (next === screen) return;
  mounted?.leave?.();
  screen = next;
  document.body.dataset.screen = next.id;
  document.title = `${next.title} · ${store.state.project.name} · finessl`;
  mounted = next.mount();
  replace($("main"), mounted.element);
  drawNavigation();
  mounted.update?.();
}

function drawNavigation() {
  replace($("nav"), ...SCREENS.map((one) => h("a", { href: `#${one.id}`, "aria-current": one === screen ? "page" : undefined }, one.title)));
  $("nav").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function drawStatus() {
  const { state, unsaved } = store;
  if (!state) return;
  renew($("project"), state.project.name);
  renew($("labels"), plural(state.labels, "label") + (unsaved > 1 ? ` · ${unsaved} being saved` : ""));
  const { kind, value, low, high } = state.accuracy;
  const button = $("accuracy");
  button.hidden = kind === null;
  if (kind === null) return;
  renew(button, h("b", {}, percent(value)), h("span", {}, ` ± ${Math.round(50 * (high - low))}`), h("small", {}, kind));
  button.setAttribute("aria-label", `${kind} accuracy ${percent(value)}, between ${percent(low)} and ${percent(high)}. How was it measured?`);
}

function explainAccuracy() {
  const { kind, value, low, high, n, how } = /** @type {NonNullable<typeof store.state>} */ (store.state).accuracy;
  dialog.open(
    `${percent(value)}, ${kind}`,
    h("p", {}, `With 95 % confidence between ${percent(low)} and ${percent(high)}, from ${plural(n, kind === "audited" ? "audited image" : "label")}.`),
    h("p", {}, how),
    kind !== "audited" && h("a", { class: "button", href: "#audit", onclick: () => dialog.close() }, "Audit 20 images"),
  );
}

/** As a shell takes it. @param {string} path */
const quoted = (path) => (/^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`);

function drawNotice() {
  const { connection, unsaved, state } = store;
  const kept = unsaved ? ` ${plural(unsaved, "answer")} ${unsaved === 1 ? "is" : "are"} kept in this page until then: leave it open.` : "";
  const text = {
    lost: `The studio does not answer. It reconnects by itself; if it was closed, start it again with “finessl studio ${quoted(state?.project.data ?? "DATA")}”.${kept}`,
    denied: `This page is not signed in, perhaps because the studio was started again. Open the address that the terminal shows.${kept}`,
  }[/** @type {string} */ (connection)];
  $("notice").hidden = !text;
  $("notice").textContent = text ?? "";
  document.body.classList.toggle("away", Boolean(text));
}

/** @param {KeyboardEvent} event */
function frameKey(event) {
  if (event.key === "?") dialog.showKeys(screen?.title ?? "", screen?.keys ?? [], FRAME_KEYS);
  else if (event.key === "[" || event.key === "]") {
    const position = screen ? SCREENS.indexOf(screen) : 0;
    const next = SCREENS[position + (event.key === "]" ? 1 : -1)];
    if (next) location.hash = next.id;
  } else return false;
  return true;
}

async function begin() {
  subscribe(() => {
    drawNotice();
    drawStatus();
    route();
    mounted?.update?.();
  });
  addEventListener("hashchange", route);
  addEventListener("beforeunload", (event) => store.unsaved > 0 && event.preventDefault());
  handleKeys(() => mounted?.key, frameKey);
  $("accuracy").addEventListener("click", explainAccuracy);
  $("keys-button").addEventListener("click", () => frameKey(new KeyboardEvent("keydown", { key: "?" })));
  $("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the hash names the screen
    $("main").focus();
  });
  replace($("main"), h("p", { class: "loading" }, "Opening…"));
  try {
    update({ state: await get("/api/state"), connection: "live" });
  } catch (error) {
    replace($("main"), empty("The studio did not open", error instanceof Error ? error.message : "", h("button", { onclick: () => location.reload() }, "Try again")));
  }
  listen();
}

void begin();
