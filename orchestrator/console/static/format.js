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

/** How far a fetch is, such as "fetching 40 %". */
export function progress(replica) {
  const fetch = replica.fetch;
  if (!fetch) return replica.state;
  const share = fetch.total ? ` ${Math.floor((100 * fetch.bytes) / fetch.total)} %` : "";
  const left = fetch.left_s === null ? "" : `, ${seconds(fetch.left_s)} left`;
  return `${fetch.phase}${share}${left}`;
}
