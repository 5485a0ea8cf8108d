// Plan: a spec in an editor, what the controller says it would change, and its apply at exactly that state.

import { call } from "./api.js";
import { offersAt } from "./completion.js";
import { h } from "./dom.js";
import { planResult, problemList } from "./plan_result.js";
import { state } from "./state.js";

export const title = "Plan";

const spec = { text: "", file: "spec.yaml", base_dir: "/", revision: null };
let outcome = null; // {plan} or {refusal}, of `planned`
let planned = null;
let busy = "";
let said = "";
let offered = { from: 0, offers: [] };
let redraw = () => {};
const editor = () => document.getElementById("spec");

export function enter(draw) {
  redraw = draw;
  if (spec.revision === null) loadRunning();
}

async function loadRunning() {
  Object.assign(spec, await call("spec"));
  outcome = planned = null;
  said = `The running spec, revision ${spec.revision}.`;
  if (editor()) editor().value = spec.text;
  redraw();
}

export function on(type, act, target, event) {
  if (act === "edit") edited(type, target, event);
  if (type !== "click") return;
  if (act === "running") loadRunning();
  if (act === "plan") plan();
  if (act === "apply") apply();
  if (act === "jump") jump(Number(target.dataset.line));
  if (act === "offer") insert(offered.offers[Number(target.dataset.place)].text);
}

function edited(type, target, event) {
  spec.text = target.value;
  if (type === "keydown" && event.key === " " && event.ctrlKey) {
    event.preventDefault();
    offered = offersAt(state.facts.schema, target.value, target.selectionStart);
  } else if (type === "keydown" && event.key === "ArrowDown" && event.altKey && offered.offers.length) {
    event.preventDefault();
    document.querySelector("[data-act=offer]")?.focus();
  } else if (type === "keydown" && event.key === "Enter" && event.ctrlKey) {
    plan();
  } else if (type === "input") {
    offered = offersAt(state.facts.schema, target.value, target.selectionStart);
  }
}

function insert(text) {
  const field = editor();
  field.setRangeText(text, offered.from, field.selectionStart, "end");
  spec.text = field.value;
  offered = { from: 0, offers: [] };
  field.focus();
}

function jump(line) {
  const field = editor();
  const start = spec.text.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
  field.focus();
  field.setSelectionRange(start, start + (spec.text.split("\n")[line - 1] ?? "").length);
  field.scrollTop = (line - 3) * parseFloat(getComputedStyle(field).lineHeight);
}

async function plan() {
  busy = "Planning…";
  said = "";
  redraw();
  const asked = spec.text;
  try {
    outcome = { plan: await call("propose", { text: asked, file: spec.file, base_dir: spec.base_dir }) };
  } catch (refusal) {
    outcome = { refusal };
  }
  planned = asked;
  busy = "";
  redraw();
}

async function apply() {
  busy = "Applying…";
  redraw();
  try {
    const { text } = { text: planned };
    const done = await call("apply", { text, file: spec.file, base_dir: spec.base_dir, check_index: outcome.plan.index });
    said = done.changed ? `Revision ${done.revision} is rolled out.` : `Nothing has changed: revision ${done.revision}.`;
    outcome = null;
  } catch (refusal) {
    if (refusal.code === "index-changed") {
      await plan();
      said = "The fleet has changed since the plan, so nothing was applied. This is the plan as of now.";
    } else {
      outcome = { refusal };
    }
  }
  busy = "";
  redraw();
}

export function view() {
  const current = outcome?.plan && planned === spec.text;
  const problems = outcome?.refusal?.problems ?? outcome?.plan?.problems ?? [];
  const marked = new Set(planned === spec.text ? problems.map((each) => Number(/:(\d+):\d+$/.exec(each.where)?.[1])) : []);
  return h("div", { class: "plan" },
    h("div", { class: "card" },
      h("p", { class: "plan-head" }, h("label", { for: "spec" }, `Spec, relative to ${spec.base_dir}`),
        h("button", { type: "button", "data-act": "running" }, "Load the running spec")),
      h("div", { class: "editor" },
        h("ol", { class: "lines", "aria-hidden": "true" }, spec.text.split("\n").map((_, at) =>
          h("li", { class: marked.has(at + 1) ? "bad" : null }, String(at + 1)))),
        h("textarea", { id: "spec", "data-act": "edit", "data-own": true, class: "code", spellcheck: "false", wrap: "off",
          autocomplete: "off", rows: "28", "aria-describedby": "spec-help" })),
      h("p", { class: "dim", id: "spec-help" }, "Ctrl+Space offers keys and values, Alt+↓ goes to them, Ctrl+Enter plans."),
      offered.offers.length > 0 && h("ul", { class: "offers", "aria-label": "Completions" }, offered.offers.slice(0, 12).map((each, at) =>
        h("li", {}, h("button", { type: "button", "data-act": "offer", "data-place": String(at), title: each.detail }, each.text.trim()),
          h("span", { class: "dim" }, ` ${each.detail.split(". ")[0]}`)))),
      h("p", { class: "buttons" },
        h("button", { type: "button", "data-act": "plan", disabled: busy !== "" }, "Plan"),
        h("button", { type: "button", class: "primary", "data-act": "apply", disabled: !current || busy !== "" }, "Apply"))),
    h("div", { class: "card result", role: "region", "aria-label": "Plan", "aria-live": "polite" },
      busy && h("p", {}, busy), said && h("p", {}, h("strong", {}, said)),
      outcome?.refusal && [h("p", { class: "problem" }, `${outcome.refusal.message}. ${outcome.refusal.hint}`), problemList(problems, true)],
      outcome?.plan && [planned !== spec.text && h("p", { class: "warn" }, "The spec was edited since this plan."), planResult(outcome.plan)],
      !outcome && !busy && !said && h("p", { class: "dim" }, "Plan shows what an apply would change. Nothing changes before Apply.")));
}

/** Called after each drawing: the editor's text is its own, and the line numbers follow it. */
export function drawn() {
  const field = editor();
  if (field.value === "" && spec.text !== "") field.value = spec.text;
  field.onscroll = () => {
    field.previousElementSibling.scrollTop = field.scrollTop;
  };
}
