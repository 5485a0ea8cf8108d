// Models: what each serves and how fast, its replicas, and the changes by hand, each previewed before it is made.

import { call } from "./api.js";
import { cellsOf, headRow, readyOf } from "./columns.js";
import { changeDialog, rollbackDialog } from "./changes.js";
import { openDialog } from "./dialog.js";
import { h } from "./dom.js";
import { clock, count, milliseconds, NONE, number, progress, seconds } from "./format.js";
import { rayLinks } from "./ray_links.js";
import { colourOf, letterOf, models, state, usualLoad } from "./state.js";

export const title = "Models";

const MEASURED = ["Tokens/s", "TTFT p50\u00a0/\u00a0p99", "Between tokens p50\u00a0/\u00a0p99", "Cold starts", "Cache", ""];

export function on(type, act, target) {
  if (type !== "click") return;
  const { model, replica } = target.dataset;
  if (act === "log") showLog(model, replica);
  else if (act === "rollback") rollbackDialog();
  else if (act === "change") changeDialog(target.dataset.change, replica ?? model);
}

export function view() {
  return [rolloutCard(), h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Models" },
    h("table", {},
      headRow("models", MEASURED),
      h("tbody", {}, models().map(row)))),
    models().map(replicaCard)];
}

function rolloutCard() {
  const { rollout } = state.fleet;
  const busy = rollout.models.filter((each) => each.state !== "complete");
  return h("div", { class: "card", "data-key": "rollout" },
    h("h2", {}, `Revision ${rollout.revision}: ${rollout.state}`),
    rollout.reason && h("p", {}, rollout.reason),
    busy.length > 0 && h("ul", {}, busy.map((each) =>
      h("li", {}, `${each.model}: ${each.state}${each.strategy ? ` by ${each.strategy}` : ""}, ${each.ready} of ${each.wanted} ready, ${each.old} old`))),
    state.fleet.conditions.filter((each) => !each.status).map((each) =>
      h("p", { class: "problem" }, `${each.type}: ${each.reason}. ${each.message}`)),
    h("p", {}, h("button", { type: "button", "data-act": "rollback" }, "Roll back…")));
}

function row(model) {
  const load = state.load[model.name];
  const { min, max } = model.scaling;
  const button = (change, text) => h("button", { type: "button", "data-act": "change", "data-change": change,
    "data-model": model.name, "aria-label": `${text.replace("…", "")} ${model.name}` }, text);
  const pair = (low, high) => `${milliseconds(low)} / ${milliseconds(high)}`;
  return h("tr", { "data-key": model.name },
    cellsOf("models", model, "name", {
      name: [h("span", { class: `chip ${colourOf(model.name)}`, "aria-hidden": "true" }, letterOf(model.name)), ` ${model.name}`],
      state: [h("span", { class: model.state === "ready" ? "good" : model.state === "unloaded" ? "dim" : "bad" }, model.state),
        model.reason && h("div", { class: "dim" }, model.reason)],
      "": [readyOf(model), h("div", { class: "dim" }, model.scaled
        ? `set to ${model.scaled.count ?? "the spec"} by ${model.scaled.by}` : min === max ? "" : `${min} to ${max}`)],
    }),
    h("td", { class: "number" }, number(load?.tokens_per_s)),
    h("td", { class: "number" }, load ? pair(load.ttft_p50_ms, load.ttft_p99_ms) : NONE),
    h("td", { class: "number" }, load ? pair(load.gap_p50_ms, load.gap_p99_ms) : NONE),
    h("td", { class: "number" }, load ? load.cold : NONE, lastLoad(model)),
    h("td", {}, cache(model)),
    h("td", {}, h("span", { class: "buttons pairs" },
      model.scaling.max > 0 && button("scale", "Scale…"),
      model.wanted === 0 ? button("load", "Load…") : button("unload", "Unload…"),
      model.replicas.length > 0 && button("restart", "Restart…"))));
}

/** The longest of the replicas' last starts, which is what a cold start costs. */
function lastLoad(model) {
  const longest = Math.max(0, ...model.replicas.map((each) => each.load_s ?? 0));
  return longest > 0 && h("div", { class: "dim" }, `${seconds(longest)} to load`);
}

/** Of the replicas whose last start could have compiled, those that found everything in the NEFF cache. */
function neffHits(model) {
  const known = model.replicas.filter((each) => each.compiled !== null);
  const hits = known.filter((each) => !each.compiled).length;
  if (known.length === 0) return null;
  return `NEFF ${hits === known.length ? "hit" : hits === 0 ? "compiled" : `hit by ${hits} of ${known.length}`}`;
}

/** What the last starts found in the NEFF cache, how full the KV caches are, as far as servers report it, and what is
 *  prepared for a new version. */
function cache(model) {
  const used = model.replicas.map((each) => each.server?.kv_usage).filter((each) => each !== undefined && each !== null);
  const parts = [neffHits(model), used.length > 0 && `KV ${Math.round(100 * Math.max(...used))} %`,
    ...model.preparing.map((each) => `${each.state} on ${each.host}`),
    ...model.replicas.filter((each) => each.fetch).map((each) => `${each.id}: ${progress(each, usualLoad(model))}`),
    ...model.replicas.filter((each) => each.compile_s > 0).map((each) => `${each.id}: compiled ${seconds(each.compile_s)}`)];
  const shown = parts.filter(Boolean);
  return shown.length ? shown.map((part) => h("div", {}, part)) : h("span", { class: "dim" }, NONE);
}

function replicaCard(model) {
  if (!model.replicas.length) return null;
  return h("details", { class: "card", "data-key": `replicas-${model.name}`, open: model.state !== "ready" },
    h("summary", {}, `${model.name}: ${count(model.replicas.length, "replica")}`),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Replicas of ${model.name}` }, h("table", {},
      headRow("replicas", ["Start", ""]),
      h("tbody", {}, model.replicas.map((replica) => replicaRow(model, replica))))));
}

function replicaRow(model, replica) {
  const number = replica.id.split("/").at(-1);
  const data = { type: "button", "data-model": model.name, "data-replica": replica.id };
  return h("tr", { "data-key": replica.id },
    cellsOf("replicas", replica, "id", {
      state: [h("span", { class: replica.state === "ready" ? "good" : replica.state === "failed" ? "bad" : "warn" },
        progress(replica, usualLoad(model))), replica.reason && h("div", { class: "dim" }, replica.reason)],
    }),
    h("td", {}, start(replica)),
    h("td", {}, h("span", { class: "buttons" },
      h("button", { ...data, "data-act": "log", "aria-label": `Log of ${replica.id}`, "data-number": number }, "Log"),
      h("button", { ...data, "data-act": "change", "data-change": "drain", "aria-label": `Drain ${replica.id}` }, "Drain…")),
    rayLinks(replica.id)));
}

/** The number of the replica's start, and the time of the last one with its longest phases. */
function start(replica) {
  const phases = Object.entries(replica.load_phases).filter(([, each]) => each >= 0.05).sort(([, a], [, b]) => b - a).slice(0, 3);
  const text = phases.map(([name, each]) => `${name.replace("_", " ")} ${seconds(each)}`).join(", ");
  return [`${replica.epoch}, ${seconds(replica.load_s)}`, replica.compiled && ", compiled",
    text && h("div", { class: "dim" }, text)];
}

const LOG_CHARACTERS = 200_000; // that a dialog keeps

async function showLog(model, replica) {
  const text = h("pre", { class: "log", tabindex: "0" }, "");
  let offset = null;
  const more = async () => {
    const query = { model, replica: replica.split("/").at(-1), ...(offset === null ? {} : { offset }) };
    const part = await call("logs", query);
    offset = part.offset;
    text.textContent = (text.textContent + part.text).slice(-LOG_CHARACTERS);
    text.scrollTop = text.scrollHeight;
  };
  let open = true;
  const follow = async () => {
    while (open) {
      await more();
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  };
  follow().catch((error) => text.append(`\n${error.message} The log is followed no longer.`));
  await openDialog({ title: `Log of ${replica}, since ${clock(Date.now() / 1000)} live`, body: [text], confirm: "Close",
    onConfirm: () => {}, cancels: false, escapes: true });
  open = false;
}
