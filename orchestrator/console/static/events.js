// Events: what has happened, newest first, filtered by text, level, model and host.

import { cellsOf, headRow } from "./columns.js";
import { h } from "./dom.js";
import { count } from "./format.js";
import { hosts, models, state } from "./state.js";

export const title = "Events";

const SHOWN = 300;
const LEVELS = { error: "bad", warning: "warn" };
const filters = { text: "", level: "", model: "", host: "" };

export function on(type, act, target) {
  if (act === "filter" && (type === "input" || type === "change")) filters[target.dataset.field] = target.value;
}

function matches(event) {
  const text = `${event.reason} ${event.message} ${event.replica ?? ""} ${event.model ?? ""} ${event.host ?? ""}`.toLowerCase();
  return filters.text.toLowerCase().split(/\s+/).every((word) => text.includes(word)) &&
    (!filters.level || event.level === filters.level || (filters.level === "warning" && event.level === "error")) &&
    (!filters.model || event.model === filters.model) && (!filters.host || event.host === filters.host);
}

function choice(field, label, options) {
  return [h("label", { for: `events-${field}` }, label),
    h("select", { id: `events-${field}`, "data-act": "filter", "data-field": field },
      options.map(([value, text]) => h("option", { value, selected: filters[field] === value }, text)))];
}

export function view() {
  const found = state.events.filter(matches).reverse();
  const named = (all) => [["", "all"], ...all.map((each) => [each.name, each.name])];
  return h("div", { class: "card" },
    h("p", { class: "filter" },
      h("label", { for: "events-text" }, "Filter"),
      h("input", { id: "events-text", type: "search", "data-act": "filter", "data-field": "text", value: filters.text }),
      choice("level", "Level", [["", "all"], ["warning", "warnings and errors"], ["error", "errors"]]),
      choice("model", "Model", named(models())), choice("host", "Host", named(hosts())),
      h("span", { role: "status" }, `${count(found.length, "event")} of ${state.events.length}`)),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" }, h("table", {},
      headRow("events"),
      h("tbody", {}, found.slice(0, SHOWN).map((event) => h("tr", { "data-key": String(event.seq) },
        cellsOf("events", event, "reason", { level: h("span", { class: LEVELS[event.level] ?? "dim" }, event.level) })))))),
    found.length > SHOWN && h("p", { class: "dim" }, `The newest ${SHOWN} are shown.`));
}
