// Plots of the last hour: the controller's samples, one line for each model.

import { call } from "./api.js";
import { h } from "./dom.js";
import { numberOf, state } from "./state.js";

export const title = "Plots";

const HEIGHT = 180;
const CHARTS = [
  ["queue", "Requests waiting"], ["running", "Requests running"], ["tokens_per_s", "Tokens per second"],
  ["ttft_p50_ms", "Time to first token, p50, ms"], ["ttft_p99_ms", "Time to first token, p99, ms"],
  ["gap_p50_ms", "Between tokens, p50, ms"], ["gap_p99_ms", "Between tokens, p99, ms"],
];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]]; // beside the colour
let history = null;
let seen = null;
let drawnOf = null;
let redraw = () => {};
let charts = [];
const dark = matchMedia("(prefers-color-scheme: dark)");

export function enter(draw) {
  redraw = draw;
  seen = drawnOf = null;
  window.addEventListener("resize", resize);
  dark.addEventListener("change", restyle);
}

export function leave() {
  window.removeEventListener("resize", resize);
  dark.removeEventListener("change", restyle);
  for (const chart of charts) chart.destroy();
  charts = [];
}

export function view() {
  if (seen !== state.load) {
    seen = state.load;
    call("load_history").then((answer) => {
      history = answer;
      redraw();
    }).catch(() => {}); // the line on top says that the controller is away
  }
  if (!history) return h("p", { class: "dim" }, "Fetching the last hour.");
  if (history.at.length === 0) return h("p", { class: "dim" }, "There is no sample yet: the controller takes one every 10 s.");
  return h("div", { class: "charts" }, CHARTS.map(([figure, name]) =>
    h("figure", { class: "card", "data-key": figure },
      h("figcaption", {}, name, h("span", { class: "dim" }, summary(figure))),
      h("div", { class: "chart", "data-figure": figure, "data-own": true, role: "img", "aria-label": `${name}${summary(figure)}` }))));
}

/** The last value of each model, which also stands for the plot where it cannot be seen. */
function summary(figure) {
  const last = Object.entries(history.models).map(([name, figures]) => [name, figures[figure].at(-1)])
    .filter(([, value]) => value !== null && value !== undefined);
  return last.length ? `: ${last.map(([name, value]) => `${name} ${Number(value.toFixed(1))}`).join(", ")}` : "";
}

export function drawn(main) {
  if (!history || drawnOf === history) return;
  const names = Object.keys(history.models);
  const same = drawnOf !== null && names.join() === Object.keys(drawnOf.models).join() && charts.length > 0;
  drawnOf = history;
  const places = [...main.querySelectorAll("[data-figure]")];
  if (same) {
    charts.forEach((chart, at) => chart.setData(dataOf(places[at].dataset.figure)));
    return;
  }
  for (const chart of charts) chart.destroy();
  charts = places.map((place) => new uPlot(options(place, names), dataOf(place.dataset.figure), place));
}

const dataOf = (figure) => [history.at, ...Object.values(history.models).map((figures) => figures[figure])];

function options(place, names) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  return {
    width: place.clientWidth, height: HEIGHT, cursor: { points: { size: 6 } }, legend: { live: true },
    scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
    axes: [{ ...axis, values: "{HH}:{mm}" }, { ...axis, size: 56 }],
    series: [{ value: "{HH}:{mm}:{ss}" }, ...names.map((name) => {
      const number = Math.max(0, numberOf(name));
      return { label: name, stroke: colour(`--m${number % 12}`), width: 2, dash: DASHES[Math.floor(number / 3) % 4], spanGaps: false };
    })],
  };
}

function resize() {
  for (const chart of charts) chart.setSize({ width: chart.root.parentElement.clientWidth, height: HEIGHT });
}

function restyle() {
  for (const chart of charts) chart.destroy();
  charts = [];
  drawnOf = null;
  redraw();
}
