// Requests: where each waits or runs, how long it has waited, and why it got its replica.

import { call } from "./api.js";
import { openDialog } from "./dialog.js";
import { h } from "./dom.js";
import { milliseconds, NONE, seconds } from "./format.js";
import { models, state } from "./state.js";

export const title = "Requests";
export const stream = "requests"; // what the stream sends while this view is open

let chosen = "";

export function on(type, act, target) {
  if (act === "model" && type === "change") chosen = target.value;
  if (act === "cancel" && type === "click") cancel(target.dataset.request);
}

function cancel(request) {
  const known = state.requests.find((each) => each.request === request);
  return openDialog({
    title: `Cancel ${request}`,
    body: [h("p", {}, `Its client gets the error request_cancelled${known?.tokens ? `, after ${known.tokens} tokens` : ""}.`)],
    confirm: "Cancel the request",
    danger: true,
    onConfirm: () => call("cancel_request", { request }),
  });
}

export function view() {
  const shown = state.requests.filter((each) => !chosen || each.model === chosen);
  const open = shown.filter((each) => !each.ended);
  const waiting = open.filter((each) => !each.replica).length;
  const heads = ["Request", "Model", "State", "Queue", "Age", "Replica", "Why this one", "Tokens", ""];
  return h("div", { class: "card" },
    h("p", { class: "filter" }, h("label", { for: "requests-model" }, "Model"),
      h("select", { id: "requests-model", "data-act": "model" }, h("option", { value: "" }, "all"),
        models().map((model) => h("option", { value: model.name, selected: chosen === model.name }, model.name))),
      h("span", { role: "status" }, `${open.length - waiting} running, ${waiting} waiting, ${shown.length - open.length} ended while this view was open`)),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Requests" }, h("table", {},
      h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, shown.map(row)))),
    shown.length === 0 && h("p", { class: "dim" }, "No request is in a queue or a slot. Gateways report once a second."));
}

function row(each) {
  const kind = each.ended ? `ended: ${each.ended}` : each.replica ? "running" : "waiting";
  return h("tr", { "data-key": each.request },
    h("th", { scope: "row" }, h("code", {}, each.request), each.key && h("div", { class: "dim" }, `key ${each.key}`)),
    h("td", {}, each.model),
    h("td", { class: each.ended ? "dim" : each.replica ? "good" : "warn" }, kind),
    h("td", { class: "number" }, milliseconds(each.queue_ms)), h("td", { class: "number" }, seconds(each.age_s)),
    h("td", {}, each.replica || NONE), h("td", {}, why(each.decision)),
    h("td", { class: "number" }, `${each.prompt_tokens} + ${each.tokens}`),
    h("td", {}, !each.ended && h("button", { type: "button", "data-act": "cancel", "data-request": each.request,
      "aria-label": `Cancel ${each.request}` }, "Cancel…")));
}

function why(decision) {
  if (!decision) return NONE;
  const parts = [`slot ${decision.slot} of ${decision.slots}`, `${decision.candidates} with a free slot`,
    decision.affinity && `for its ${decision.affinity}`, decision.cold && "no replica was ready when it came",
    decision.retries > 0 && `${decision.retries} tried before`];
  return parts.filter(Boolean).join(", ");
}
