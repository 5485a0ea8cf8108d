// Playground: one prompt to two models, their answers side by side as they come, with the times of each.

import { messages, Refusal, request } from "./api.js";
import { h } from "./dom.js";
import { milliseconds, number } from "./format.js";
import { models } from "./state.js";

export const title = "Playground";

const sides = [side(0), side(1)];
const form = { prompt: "", maxTokens: "256", temperature: "0", key: "" };
let redraw = () => {};

function side(at) {
  return { at, model: null, turns: [], abort: null };
}

export function enter(draw) {
  redraw = draw;
}

export function on(type, act, target, event) {
  if (type === "input" && act === "field") form[target.dataset.field] = target.value;
  if (type === "change" && act === "model") sides[target.dataset.side].model = target.value;
  const sends = act === "send" || (act === "field" && target.dataset.field === "prompt" && type === "keydown" && event.key === "Enter" && event.ctrlKey);
  if (sends && (type === "click" || type === "keydown")) send();
  if (type === "click" && act === "stop") for (const each of sides) each.abort?.abort();
  if (type === "click" && act === "clear") for (const each of sides) each.turns = [];
}

const chosen = (each) => each.model ?? (each.at === 0 ? models().find((model) => model.kind === "generate")?.name ?? "" : "");

function send() {
  if (form.prompt.trim() === "" || sides.some((each) => each.abort)) return;
  for (const each of sides) if (chosen(each)) ask(each, chosen(each), form.prompt);
}

async function ask(each, model, prompt) {
  const earlier = each.turns.filter((turn) => turn.model === model && !turn.problem)
    .flatMap((turn) => [{ role: "user", content: turn.prompt }, { role: "assistant", content: turn.text }]);
  const turn = { model, prompt, text: "", reasoning: "", tokens: 0, began: performance.now(), first: null, last: null, decision: "", problem: "" };
  each.turns.push(turn);
  each.abort = new AbortController();
  const body = { model, stream: true, stream_options: { include_usage: true }, max_tokens: Number(form.maxTokens) || 256,
    temperature: Number(form.temperature) || 0, messages: [...earlier, { role: "user", content: prompt }] };
  const headers = { "content-type": "application/json", ...(form.key ? { "x-corewright-inference-key": form.key } : {}) };
  try {
    const response = await request("gateway/v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers, signal: each.abort.signal });
    if (!response.ok) throw new Refusal(response.status, await response.json().catch(() => null));
    turn.decision = response.headers.get("x-corewright-decision") ?? "";
    for await (const { data } of messages(response)) if (data !== null && data !== "[DONE]") take(turn, JSON.parse(data));
  } catch (error) {
    turn.problem = each.abort.signal.aborted ? "Stopped." : error.message;
  }
  each.abort = null;
  redraw();
}

function take(turn, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  const { content, reasoning } = chunk.choices?.[0]?.delta ?? {};
  if (content || reasoning) {
    turn.last = performance.now();
    turn.first ??= turn.last;
    turn.text += content ?? "";
    turn.reasoning += reasoning ?? "";
  }
  turn.tokens = chunk.usage?.completion_tokens ?? turn.tokens;
  redraw();
}

export function view() {
  const busy = sides.some((each) => each.abort);
  const field = (name, label, more) => h("span", { class: "field" }, h("label", { for: `play-${name}` }, label),
    h("input", { id: `play-${name}`, "data-act": "field", "data-field": name, value: form[name], ...more }));
  return [
    h("div", { class: "card" },
      h("label", { for: "prompt" }, "Prompt (Ctrl+Enter sends)"),
      h("textarea", { id: "prompt", class: "prompt", rows: "3", "data-act": "field", "data-field": "prompt", "data-own": true }, form.prompt),
      h("p", { class: "filter" },
        field("maxTokens", "Tokens", { type: "number", min: "1" }), field("temperature", "Temperature", { type: "number", min: "0", max: "2", step: "0.1" }),
        field("key", "Inference key, if the gateway needs one", { type: "password", autocomplete: "off" })),
      h("p", { class: "buttons" }, h("button", { type: "button", "data-act": "clear", disabled: busy }, "Clear"),
        busy && h("button", { type: "button", "data-act": "stop" }, "Stop"),
        h("button", { type: "button", class: "primary", "data-act": "send", disabled: busy }, "Send"))),
    h("div", { class: "sides" }, sides.map(column)),
  ];
}

function column(each) {
  const names = models().filter((model) => model.kind === "generate").map((model) => model.name);
  return h("section", { class: "card", "aria-label": each.at === 0 ? "Left" : "Right" },
    h("p", { class: "filter" }, h("label", { for: `side-${each.at}` }, each.at === 0 ? "First model" : "Second model"),
      h("select", { id: `side-${each.at}`, "data-act": "model", "data-side": String(each.at) },
        [each.at === 1 && "", ...names].filter((name) => name !== false).map((name) =>
          h("option", { value: name, selected: name === chosen(each) }, name || "none")))),
    h("div", { role: "log", "aria-label": "Answers", "aria-busy": String(each.abort !== null) }, each.turns.map((turn) => h("article", { class: "turn" },
      h("p", { class: "dim" }, `${turn.model} ← ${turn.prompt}`),
      turn.reasoning && h("pre", { class: "answer dim" }, turn.reasoning),
      h("pre", { class: "answer" }, turn.text),
      turn.problem && h("p", { class: "problem" }, turn.problem),
      h("p", { class: "dim" }, times(turn)), turn.decision && h("p", { class: "dim" }, turn.decision)))));
}

/** The times as this page saw them: they include the way through the controller. */
function times(turn) {
  if (turn.first === null) return "";
  const span = (turn.last - turn.first) / 1000;
  const rate = turn.tokens > 1 && span > 0 ? `, ${number((turn.tokens - 1) / span)} tokens/s` : "";
  return `first token after ${milliseconds(turn.first - turn.began)}${turn.tokens ? `, ${turn.tokens} tokens` : ""}${rate}, in all ${milliseconds(turn.last - turn.began)}`;
}
