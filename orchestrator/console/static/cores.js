// Cores: each host as its devices and cores, who holds them, and what one core's memory holds.

import { changeDialog } from "./changes.js";
import { h } from "./dom.js";
import { coresOf, count, gib, NONE, progress, seconds, share } from "./format.js";
import { rayLinks } from "./ray_links.js";
import { colourOf, hosts, letterOf, models, replicas, state, usualLoad } from "./state.js";

export const title = "Cores";

const CLASSES = ["weights, sharded", "weights, replicated", "KV cache", "draft weights", "scratch", "runtime", "embedding",
  "draft KV cache", "overhead"]; // of memory; each has a colour
const DRAWN = 2; // so many hosts are drawn whole; more are an overview
const MARKS = { failed: "!", draining: "↓", stopping: "↓", loading: "…", fetching: "…", compiling: "…", pending: "…" };
let filter = "";
let selected = null; // {host, core}

export function on(type, act, target) {
  if (type === "input" && act === "filter") filter = target.value;
  if (type === "click" && act === "drain") changeDialog("drain", target.dataset.host);
  if (type === "click" && act === "core") {
    const { host, core } = target.dataset;
    const same = selected && selected.host === host && selected.core === Number(core);
    selected = same ? null : { host, core: Number(core) };
  }
}

export function view([zoomed]) {
  const all = hosts();
  if (zoomed && state.hosts[zoomed]) {
    return [h("p", {}, h("a", { href: "#cores" }, `← all ${count(all.length, "host")}`)), whole(state.hosts[zoomed])];
  }
  return [legend(), all.length <= DRAWN ? all.map(whole) : overview(all)];
}

/** Returns what each core of a host is: `{core, kind, replica}`. */
function cells(host) {
  const cores = Array.from({ length: host.cores }, (_, core) => ({ core, kind: "free", replica: null }));
  const cordoned = host.cordoned === "all" ? cores.map((each) => each.core) : host.cordoned.flatMap(coresOf);
  for (const core of cordoned) cores[core].kind = "cordoned";
  const reserved = state.plan?.hosts.find((each) => each.name === host.name)?.reserved ?? [];
  for (const core of reserved.flatMap(coresOf)) cores[core].kind = "reserved";
  for (const each of host.quarantine) Object.assign(cores[each.core], { kind: "quarantined", cause: each });
  for (const replica of replicas().filter((each) => each.host === host.name)) {
    const held = host.leases.some((lease) => lease.replica === replica.id);
    for (const core of coresOf(replica.cores)) if (held) Object.assign(cores[core], { kind: replica.state, replica });
  }
  return cores;
}

/** The name of a core for screen readers, without times, which would change each second. */
const stateText = ({ kind, replica }) => (replica ? `${replica.id}, ${replica.fetch ? progress(replica) : replica.state}` : kind);
const progressOf = (replica) => progress(replica, usualLoad(replica.model));

function legend() {
  const shown = models().map((model) =>
    h("li", {}, h("span", { class: `chip ${colourOf(model.name)}`, "aria-hidden": "true" }, letterOf(model.name)),
      ` ${model.name} `, h("span", { class: "dim" }, model.state)));
  const kinds = ["free", "cordoned", "quarantined", "reserved"].map((kind) =>
    h("li", {}, h("span", { class: `chip ${kind}`, "aria-hidden": "true" }), ` ${kind}`));
  return h("ul", { class: "legend", "aria-label": "Legend" }, shown, kinds);
}

// Many hosts

function overview(all) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = all.filter((host) => words.every((word) => textOf(host).includes(word)));
  const sum = (key) => all.reduce((total, host) => total + host[key], 0);
  const lost = all.filter((host) => host.lost).length;
  return [
    h("p", {}, `${count(all.length, "host")}, ${sum("cores")} cores: ${sum("leased")} in use, ${sum("free")} free, `,
      `${sum("free_cordoned")} cordoned, ${sum("quarantined")} quarantined${lost ? `; ${count(lost, "host")} lost` : ""}`),
    h("p", { class: "filter" }, h("label", { for: "filter" }, "Filter"),
      h("input", { id: "filter", type: "search", "data-act": "filter", "data-key": "filter", value: filter,
        placeholder: "host, model or state, such as failed" }),
      h("span", { role: "status" }, ` ${chosen.length} shown`)),
    h("ul", { class: "tiles" }, chosen.map(tile)),
  ];
}

const flags = (host) =>
  [host.lost && "lost", host.starting && "starting", host.draining && "draining", host.leaving && "leaving"].filter(Boolean);

function textOf(host) {
  const held = replicas().filter((each) => each.host === host.name);
  const kinds = [host.free && "free", host.quarantined && "quarantined", host.cordoned.length && "cordoned"];
  return [host.name, ...flags(host), ...held.map((each) => `${each.id} ${each.state}`), ...kinds].join(" ").toLowerCase();
}

function tile(host) {
  const text = [`${host.leased} of ${host.cores} in use`, ...flags(host)].join(", ");
  return h("li", { "data-key": host.name },
    h("a", { class: host.lost ? "tile lost" : "tile", href: `#cores/${encodeURIComponent(host.name)}` },
      h("span", { class: "tile-name" }, host.name), h("span", { class: "dim" }, text),
      h("span", { class: "strip", "aria-hidden": "true" }, cells(host).map((cell) =>
        h("span", { class: `cell ${cell.kind} ${cell.replica ? colourOf(cell.replica.model.name) : ""}`,
          title: `core ${cell.core}: ${stateText(cell)}` })))));
}

// One host

function whole(host) {
  const facts = state.facts.topologies[host.instance] ?? { devices: 1, link: "none" };
  const each = Math.max(1, host.cores / facts.devices);
  const all = cells(host);
  const devices = Array.from({ length: host.cores ? facts.devices : 0 }, (_, device) =>
    h("li", { class: "device", style: placed(device, facts) },
      h("span", { class: "device-name" }, `device ${device}`),
      h("span", { class: "cores" }, all.slice(device * each, (device + 1) * each).map((cell) => coreButton(host, cell)))));
  const numbers = [`${host.leased} of ${host.cores} cores in use`, count(facts.devices, "device"),
    facts.link === "none" ? null : `linked as a ${facts.link}`, host.emulated && "emulated", ...flags(host)];
  return h("section", { class: "host", "data-key": host.name },
    h("h2", {}, host.name, " ", h("span", { class: "dim" }, numbers.filter(Boolean).join(", "))),
    h("div", { class: "host-body" },
      h("ol", { class: `devices ${facts.link}`, style: { "--columns": String(columns(facts)) } }, devices),
      details(host, all)));
}

const columns = ({ devices, link }) => (link === "ring" ? devices / 2 : link === "torus" || link === "switch" ? Math.min(4, devices) : devices);

/** Row and column of a device: a ring runs to the right above and back below, so that neighbours are linked. */
function placed(device, facts) {
  const wide = columns(facts);
  const row = Math.floor(device / wide);
  const column = facts.link === "ring" && row === 1 ? 2 * wide - 1 - device : device % wide;
  return { "--row": String(row + 1), "--column": String(column + 1) };
}

function coreButton(host, cell) {
  const chosen = selected?.host === host.name && selected.core === cell.core;
  const { replica } = cell;
  const memory = memoryOf(cell, host);
  const done = replica && share(replica, usualLoad(replica.model));
  return h("button", {
    type: "button", "data-act": "core", "data-host": host.name, "data-core": String(cell.core),
    class: `core ${cell.kind} ${replica ? colourOf(replica.model.name) : ""}`, "aria-pressed": String(Boolean(chosen)),
    "aria-label": `core ${cell.core}, ${stateText(cell)}`, title: hint(host, cell, memory),
  },
  h("span", { class: "core-number" }, String(cell.core)),
  h("span", { class: "core-holder" }, replica ? letterOf(replica.model.name) + replica.id.split("/").at(-1) : ""),
  h("span", { class: "core-mark" }, replica ? MARKS[replica.state] ?? "" : cell.kind === "quarantined" ? "×" : ""),
  done !== null && done !== undefined ? h("progress", { max: "1", value: done.toFixed(3),
    "aria-label": replica.fetch ? "fetched" : "loaded" }) : memory && stack(memory));
}

const memoryOf = (cell, host) =>
  cell.replica && state.plan?.memory.find((need) => need.model === cell.replica.model.name && need.instance === host.instance);

/** What the details of a core show, as lines. */
function hint(host, cell, memory) {
  const numbers = shown(coreNumbers(cell)).map(([name, value]) => `${name}: ${value}`);
  const classes = memory ? memory.classes.filter((each) => each.gib > 0).map((each) => `  ${each.class}: ${gib(each.gib)}`) : [];
  return [`Core ${cell.core}`, ...numbers, memory && memoryText(memory), ...classes].filter(Boolean).join("\n");
}

/** The memory of a core as a stack by class, on the scale of its HBM. */
function stack(memory) {
  return h("span", { class: "stack", "aria-hidden": "true" }, memory.classes.map((each) =>
    h("span", { class: `class c${CLASSES.indexOf(each.class)}`, style: { "--share": String(each.gib / memory.hbm_gib) } })));
}

function details(host, all) {
  const cell = selected?.host === host.name ? all[selected.core] : null;
  return h("div", { class: "details", role: "region", "aria-label": `Details of ${host.name}`, "aria-live": "polite" },
    cell ? coreDetails(host, cell) : hostDetails(host));
}

const shown = (rows) => rows.filter(([, value]) => value !== null && value !== undefined && value !== false);

const pairs = (rows) => h("dl", {}, shown(rows).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

function hostDetails(host) {
  const ledger = state.plan?.hosts.find((each) => each.name === host.name);
  return [
    h("h3", {}, "Host"),
    pairs([
      ["cores", `${host.leased} in use, ${host.free} free, ${host.free_cordoned} cordoned, ${host.quarantined} quarantined, ${host.reserved} reserved`],
      ["threads", ledger && `${ledger.threads} planned on ${count(ledger.cpus, "CPU")}, ${ledger.reserve_vcpus} reserved`],
      ["memory", ledger?.memory_gib && `${gib(ledger.load_gib)} while all load, of ${gib(ledger.memory_gib)}`],
      ["cordoned", host.cordoned === "all" ? "all" : host.cordoned.join(", ") || null],
      ["leaving", host.leaving?.cause],
      ...host.quarantine.map((each) => [`core ${each.core}`, each.cause ?? `held by process ${each.pid}: ${each.command}`]),
      ...host.fetches.map((each) => [each.phase, `${each.source} ${each.total ? Math.floor((100 * each.bytes) / each.total) : 0} %`]),
    ]),
    h("p", {}, h("button", { type: "button", "data-act": "drain", "data-host": host.name, disabled: host.draining },
      "Drain the host…")),
    h("p", { class: "dim" }, "Select a core for its numbers."),
  ];
}

/** The numbers of a core as names and values; nothing for what it does not have. */
function coreNumbers({ kind, cause, replica }) {
  const placement = state.plan?.placements.find((each) => replica && `${each.model}/${each.replica}` === replica.id);
  return [
    ["state", replica ? progressOf(replica) : kind],
    ["held by", cause && (cause.cause ?? `process ${cause.pid}: ${cause.command}`)],
    ["replica", replica?.id],
    ["cores", replica && `${replica.cores}, ${count(coresOf(replica.cores).length, "core")}`],
    ["engine", replica?.engine],
    ["threads", placement && count(placement.threads, "thread")],
    ["requests", replica && `${replica.live} running, ${replica.waiting} waiting`],
    ["process", replica?.pid],
    ["starts", replica && `${replica.epoch}, ${replica.restarts} after a failure; the last took ${seconds(replica.load_s)}`],
    ["reason", replica?.reason],
  ];
}

function coreDetails(host, cell) {
  const { replica } = cell;
  const memory = memoryOf(cell, host);
  return [
    h("h3", {}, `Core ${cell.core}`),
    pairs(coreNumbers(cell)),
    memory ? memoryTable(memory) : replica && h("p", { class: "dim" }, `HBM: ${NONE}`),
    replica && rayLinks(replica.id),
  ];
}

const memoryText = (memory) =>
  `HBM of this core: ${gib(memory.total_gib)} of ${gib(memory.usable_gib)} usable, ${gib(memory.hbm_gib)} in all`;

function memoryTable(memory) {
  return h("table", { class: "memory" },
    h("caption", {}, memoryText(memory)),
    h("tbody", {}, memory.classes.map((each) => each.gib > 0 && h("tr", {},
      h("th", { scope: "row" }, h("span", { class: `swatch c${CLASSES.indexOf(each.class)}`, "aria-hidden": "true" }), ` ${each.class}`),
      h("td", {}, gib(each.gib))))));
}
