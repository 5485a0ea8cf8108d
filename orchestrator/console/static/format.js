// Numbers, times and cores as text.

export const NONE = "–";

export function number(value, digits = 1) {
  if (value === null || value === undefined) return NONE;
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);
}

export function milliseconds(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 10_000 ? `${(value / 1000).toFixed(1)} s` : `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  return value < 120 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export const gib = (value) => `${value.toFixed(value < 10 ? 2 : 1)} GiB`;

export const count = (value, noun) => `${value} ${noun}${value === 1 ? "" : /(s|x|sh|ch)$/.test(noun) ? "es" : "s"}`;

/** The cores of a range such as "3" or "8-15"; none for null. */
export function coresOf(range) {
  if (!range) return [];
  const [first, last] = range.split("-").map(Number);
  return Array.from({ length: (last ?? first) - first + 1 }, (_, place) => first + place);
}

const STARTING = ["pending", "fetching", "compiling", "loading"];
const ALMOST = 0.99; // of a load that takes longer than the last one

/** The share of a replica's start that is done, 0 to 1: of its fetch, or of its load by the time of the last one, as
 *  `usual` has it. Null if it is unknown. */
export function share(replica, usual) {
  const { fetch, state } = replica;
  if (fetch) return fetch.total ? fetch.bytes / fetch.total : null;
  return state === "loading" && usual ? Math.min(ALMOST, elapsed(replica) / usual) : null;
}

const elapsed = (replica) => Math.max(0, Date.now() / 1000 - replica.since);

/** How far a replica's start is, such as "fetching 40 %" or "loading: weights, 12.0 s left"; else its state. */
export function progress(replica, usual) {
  const { fetch, state, phase } = replica;
  if (!fetch) {
    if (!STARTING.includes(state)) return state;
    const left = state === "loading" && usual ? usual - elapsed(replica) : 0;
    return `${state}${phase ? `: ${phase.replace("_", " ")}` : ""}, ${left > 0 ? `${seconds(left)} left` : `for ${seconds(elapsed(replica))}`}`;
  }
  const percent = fetch.total ? ` ${Math.floor((100 * fetch.bytes) / fetch.total)} %` : "";
  const left = fetch.left_s === null ? "" : `, ${seconds(fetch.left_s)} left`;
  return `${fetch.phase}${percent}${left}`;
}
