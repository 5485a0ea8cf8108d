// Tables by the columns that the controller describes, which are those of the commands.

import { h } from "./dom.js";
import { clock, NONE } from "./format.js";
import { state } from "./state.js";

const FORMATS = {
  text: (value) => value,
  clock,
  ready: readyOf,
};

/** The replicas of a model that are ready, of those that are wanted. */
export function readyOf(model) {
  return `${model.replicas.filter((each) => each.state === "ready").length}/${model.wanted}`;
}

const shown = (kind) => state.facts.tables[kind];

function valueOf({ field, format }, item) {
  const values = field === "" ? [item] : field.split("|").map((path) => path.split(".").reduce((part, key) => part?.[key], item));
  const value = values.find((each) => each !== null && each !== undefined);
  return value === undefined ? NONE : FORMATS[format](value);
}

/** The row of the titles, with those of the page's own columns. */
export const headRow = (kind, own = []) =>
  h("thead", {}, h("tr", {}, [...shown(kind).map((column) => column.title), ...own].map((name) => h("th", { scope: "col" }, name))));

/** The cells of an item. `drawn` has what the page shows instead, by field; `head` is the field that names the row. */
export function cellsOf(kind, item, head, drawn = {}) {
  return shown(kind).map((column) => h(column.field === head ? "th" : "td",
    column.field === head ? { scope: "row" } : { class: column.number && "number" },
    drawn[column.field] ?? valueOf(column, item)));
}
