// A plan as the controller computes it: the changes of each model with their tags, and the cores before and after.

import { h } from "./dom.js";
import { coresOf, NONE, seconds } from "./format.js";
import { colourOf, hosts, letterOf, replicas, state } from "./state.js";

const WORDS = { create: "+", delete: "−", update: "~", replace: "−/+", none: "" };

/** Returns the elements that show a plan. */
export function planResult(plan) {
  const changed = plan.models.filter((model) => model.action !== "none");
  return [
    plan.problems.length > 0 && problemList(plan.problems),
    changed.length === 0 && plan.changes.length === 0 ? h("p", {}, "Nothing changes.") : h("div", {}, changed.map(modelChange)),
    plan.changes.length > 0 && h("p", {}, `Replicas: ${plan.changes.map((each) => `${each.change} ${each.replica}`).join(", ")}`),
    plan.moves.length > 0 && h("p", {}, `Moves: ${plan.moves.map((each) => `${each.model}/${each.replica} from ${spot(each.from)} to ${spot(each.to)}`).join("; ")}`),
    plan.hosts_to_add.length > 0 && h("p", {}, `Hosts to add: ${plan.hosts_to_add.map((each) => each.host).join(", ")}`),
    ...plan.unplaced.flatMap((each) => each.problems.map((problem) => h("p", { class: "problem" }, `${each.model}: ${problem.what}. ${problem.hint ?? ""}`))),
    coreMaps(plan),
    h("p", { class: "dim" }, `check index ${plan.index}, on revision ${plan.revision}`),
  ].filter(Boolean);
}

export function problemList(problems, jumps = false) {
  return h("ul", { class: "problems" }, problems.map((each) => {
    const line = Number(/:(\d+):\d+$/.exec(each.where)?.[1] ?? 0);
    return h("li", { class: each.severity === "error" ? "bad" : "warn" },
      jumps && line ? h("button", { type: "button", "data-act": "jump", "data-line": String(line) }, `line ${line}`) : h("span", {}, each.where),
      ` ${each.severity}: `, h("code", {}, each.id), ` ${each.what}`, each.hint && h("div", { class: "dim" }, each.hint));
  }));
}

function modelChange(model) {
  const outage = model.outage_s === null ? "outage unknown" : `outage ${seconds(model.outage_s)}`;
  const how = model.strategy && `${model.strategy}, ${outage}${model.predicted_s === null ? "" : `, done in ${seconds(model.predicted_s)}`}`;
  return h("section", { class: "change" },
    h("h3", {}, `${WORDS[model.action]} ${model.model}: ${model.action} `, h("span", { class: `tag ${model.tag}` }, model.tag),
      ` replicas ${model.replicas.before} → ${model.replicas.after}`),
    how && h("p", {}, how, model.why && h("span", { class: "dim" }, `: ${model.why}`)),
    !model.possible && h("p", { class: "problem" }, "This update is not possible."),
    model.fields.length > 0 && h("table", { class: "diff" },
      h("thead", {}, h("tr", {}, ["Field", "Before", "After"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, model.fields.map((field) => h("tr", {}, h("th", { scope: "row" }, field.field),
        h("td", { class: "removed" }, valueText(field.before)), h("td", { class: "added" }, valueText(field.after)))))));
}

const valueText = (value) => (value === null || value === undefined ? NONE : typeof value === "string" ? value : JSON.stringify(value));

const spot = ({ host, cores }) => (cores ? `${host}, cores ${cores}` : host);

/** The cores of each host that changes: above as they are, below as the plan has them. */
function coreMaps(plan) {
  const before = replicas().filter((each) => each.cores).map((each) => ({ model: each.model.name, host: each.host, cores: each.cores, id: each.id }));
  const after = plan.placements.filter((each) => each.cores).map((each) => ({ ...each, id: `${each.model}/${each.replica}` }));
  const key = (all, host) => all.filter((each) => each.host === host).map((each) => `${each.id} ${each.cores}`).sort().join();
  const names = [...new Set([...hosts().map((host) => host.name), ...after.map((each) => each.host)])];
  const differing = names.filter((name) => key(before, name) !== key(after, name));
  const shown = differing.length || names.length > 2 ? differing : names;
  if (!shown.length) return null;
  return h("div", { class: "maps" }, shown.map((name) => {
    const size = state.hosts[name]?.cores ?? plan.hosts.find((each) => each.name === name)?.cores ?? 0;
    return h("figure", {}, h("figcaption", {}, name),
      coreRow("before", before.filter((each) => each.host === name), size),
      coreRow("after", after.filter((each) => each.host === name), size));
  }));
}

function coreRow(label, held, size) {
  const holders = Array.from({ length: size }, () => null);
  for (const each of held) for (const core of coresOf(each.cores)) holders[core] = each;
  const text = held.map((each) => `${each.id} on ${each.cores}`).join(", ") || "all free";
  return h("div", { class: "core-row" }, h("span", { class: "dim core-row-name" }, label),
    h("div", { class: "strip", role: "img", "aria-label": `${label}: ${text}` }, holders.map((holder, core) =>
      h("span", { class: `cell ${holder ? colourOf(holder.model) : "free"}`, title: `core ${core}: ${holder ? holder.id : "free"}` },
        holder && (core === 0 || holders[core - 1]?.id !== holder.id) ? `${letterOf(holder.model)}${holder.id.split("/").at(-1)}` : ""))));
}
