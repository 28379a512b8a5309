// The one place that holds what the page knows. Screens read it and subscribe to it.

/**
 * @typedef {{id: number, name: string, labels: number, uncertain: number}} Class
 * @typedef {{kind: string|null, value: number, low: number, high: number, n: number, how: string}} Accuracy
 * @typedef {{state: string, plan: {backbone: string, tuning: string, steps: number, seconds: number, why: string}|null,
 *   step: number, steps: number, seconds_left: number|null, curves: Record<string, number[]>, run: string|null,
 *   message: string|null}} Training
 * @typedef {{done: number, total: number, seconds_left: number|null, backbone: string, error: string|null}} Features
 * @typedef {{project: {name: string, data: string, images: number, folder: string, v?: string, notes?: string[]}, classes: Class[], features: Features,
 *   accuracy: Accuracy, labels: number, none: number, events: number, training: Training, version: number}} State
 * @typedef {"connecting"|"live"|"lost"|"denied"} Connection
 */

/** wall: what Sort should open. @type {{state: State|null, connection: Connection, unsaved: number, wall: {id: number, label: string}|null}} */
export const store = { state: null, connection: "connecting", unsaved: 0, wall: null };

/** @type {Set<() => void>} */
const listeners = new Set();
let announced = false;

/** Calls `listener` after every change, at most once per frame. Returns the function that ends it.
 * @param {() => void} listener */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** @param {Partial<typeof store>} change */
export function update(change) {
  Object.assign(store, change);
  if (announced) return;
  announced = true;
  queueMicrotask(() => {
    announced = false;
    for (const listener of [...listeners]) listener();
  });
}

/** @param {Training} training */
export function updateTraining(training) {
  if (store.state) update({ state: { ...store.state, training } });
}

/** @returns {Class[]} */
export const classes = () => store.state?.classes ?? [];

/** @param {number|null|undefined} id @returns {Class|undefined} */
export const classById = (id) => classes().find((one) => one.id === id);

/** @param {number|null|undefined|"none"} id */
export const className = (id) =>
  id === null || id === undefined || id === "none" ? "none of these" : (classById(id)?.name ?? "a removed class");

/** Addresses of an image. `v` names the list of images, so that the browser may keep what it has for good.
 * @param {number} id */
export const thumbnail = (id) => `/thumb/${id}?v=${store.state?.project.v ?? ""}`;
/** @param {number} id */
export const large = (id) => `/image/${id}?v=${store.state?.project.v ?? ""}`;

/** The class that a digit key stands for. @param {string} key */
export const classOfKey = (key) => (/^[1-9]$/.test(key) ? classes()[Number(key) - 1] : undefined);
