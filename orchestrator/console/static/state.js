// What the page knows of the fleet: the parts that the stream has sent, and the plan of the running spec.

import { call } from "./api.js";

const MOST_EVENTS = 2000;

export const state = {
  facts: { topologies: {}, schema: {}, version: "", calls: {}, tables: {} },
  fleet: null, // the status without models and hosts, with their names in order
  models: {},
  hosts: {},
  events: [], // oldest first
  load: {}, // rates and percentiles by model
  requests: [],
  links: { replicas: {} }, // into Ray's dashboard
  plan: null, // of the running spec: threads and memory
};

export const models = () => state.fleet?.models.map((name) => state.models[name]).filter(Boolean) ?? [];
export const hosts = () => state.fleet?.hosts.map((name) => state.hosts[name]).filter(Boolean) ?? [];
export const replicas = () => models().flatMap((model) => model.replicas.map((replica) => ({ ...replica, model })));

/** How long a replica of the model loads, in seconds, from its process on: the longest of the last starts; 0: unknown. */
export function usualLoad(model) {
  const before = ({ load_phases: { actor = 0, process = 0 } }) => actor + process;
  return Math.max(0, ...model.replicas.map((each) => (each.load_s ?? 0) - before(each)));
}

/** Whether a replica starts, so that times on the page grow by themselves. */
export const anyStarts = () => models().some((model) =>
  model.replicas.some((each) => ["pending", "compiling", "loading"].includes(each.state)));

/** The place of a model in the spec: its colour and its letter. */
export const numberOf = (name) => state.fleet?.models.indexOf(name) ?? -1;

export function letterOf(name) {
  const number = numberOf(name);
  return number < 0 ? "?" : String.fromCharCode(65 + (number % 26)) + (number < 26 ? "" : Math.floor(number / 26));
}

export const colourOf = (name) => `m${Math.max(0, numberOf(name)) % 12}`;

/** Takes a message of the stream, and returns what has happened as sentences for the live region. */
export function receive(event, data) {
  if (event === "events") {
    const last = state.events.at(-1)?.seq ?? 0;
    const fresh = data.filter((each) => each.seq > last);
    const started = state.events.length > 0;
    state.events = [...state.events, ...fresh].slice(-MOST_EVENTS);
    return started ? fresh.filter((each) => each.level !== "info").map((each) => `${each.reason}: ${each.message}`) : [];
  }
  if (event !== "state") return [];
  for (const kind of ["models", "hosts"]) Object.assign(state[kind], data[kind] ?? {});
  for (const kind of ["load", "requests", "links"]) if (data[kind]) state[kind] = data[kind];
  const news = data.fleet && state.fleet ? changes(state.fleet, data.fleet) : [];
  if (data.fleet) state.fleet = data.fleet;
  return news;
}

function changes(before, after) {
  const news = [];
  if (before.ready !== after.ready) news.push(after.ready ? "The fleet is ready." : "The fleet is not ready.");
  if (before.rollout.state !== after.rollout.state || before.revision !== after.revision) {
    news.push(`Revision ${after.revision} is ${after.rollout.state}.`);
  }
  return news;
}

/** Forgets the events, before a stream that sends the recent ones again. */
export function reset() {
  state.events = [];
}

let plannedIndex = null;

/** Fetches the plan of the running spec if the fleet's index has changed: threads, and memory by class. */
export async function refreshPlan() {
  if (state.fleet === null || state.fleet.index === plannedIndex) return false;
  plannedIndex = state.fleet.index;
  const { text, file, base_dir } = await call("spec");
  state.plan = await call("propose", { text, file, base_dir });
  return true;
}
