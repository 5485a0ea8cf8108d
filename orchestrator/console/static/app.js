// The page: its key, its stream, and the view that the address names.

import { follow, hasKey, restream, setCalls, setKey } from "./api.js";
import * as cores from "./cores.js";
import { openDialog } from "./dialog.js";
import { h, render } from "./dom.js";
import * as events from "./events.js";
import { clock } from "./format.js";
import * as models from "./models.js";
import * as plan from "./plan.js";
import * as playground from "./playground.js";
import * as plots from "./plots.js";
import * as requests from "./requests.js";
import { anyStarts, receive, refreshPlan, reset, state } from "./state.js";

const VIEWS = { cores, models, plan, requests, events, playground, plots };
const FIRST = "cores";

const byId = (id) => document.getElementById(id);
const main = byId("view");
let shown = null;
let due = false;

function place() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return { name: Object.hasOwn(VIEWS, name) ? name : FIRST, rest: rest.map(decoded) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // the address was edited by hand
  }
}

/** Draws the current view with the next frame, however often it is called before. */
export function draw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    drawNow();
  });
}

function drawNow() {
  const { name, rest } = place();
  drawHeader(name);
  if (state.fleet === null) {
    render(main, h("p", { class: "empty" }, hasKey() ? "Waiting for the controller." : "Enter a key to see the fleet."));
    return;
  }
  if (shown !== name) {
    VIEWS[shown]?.leave?.();
    main.replaceChildren();
    shown = name;
    VIEWS[name].enter?.(draw);
  }
  render(main, VIEWS[name].view(rest));
  VIEWS[name].drawn?.(main);
}

function drawHeader(name) {
  const fleet = state.fleet;
  document.title = `${VIEWS[name].title} · ${fleet?.name ?? "corewright"}`;
  byId("fleet").textContent = fleet?.name ?? "corewright";
  const health = byId("health");
  health.textContent = fleet === null ? "" : fleet.ready ? "ready" : "not ready";
  health.className = `badge ${fleet?.ready ? "good" : "bad"}`;
  byId("summary").textContent =
    fleet === null ? "" : `revision ${fleet.revision} ${fleet.rollout.state}, index ${fleet.index}`;
  const links = Object.entries(VIEWS).map(([id, view]) =>
    h("li", {}, h("a", { href: `#${id}`, "aria-current": id === name && "page" }, view.title)));
  render(byId("views"), links);
}

function connected(text, lost) {
  const line = byId("connection");
  line.textContent = text;
  line.className = lost ? "lost" : "";
}

async function askKey(refusal) {
  connected("", false);
  const field = h("input", { id: "key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  await openDialog({
    title: "Key",
    body: [
      h("p", {}, "The page keeps the key in its memory only. ",
        h("code", {}, "corewright console"), " shows one that is valid for this fleet."),
      refusal && h("p", { class: "problem" }, refusal.message),
      h("label", { for: "key" }, "Token of the fleet, or an API key of scope admin"),
      field,
    ],
    confirm: "Log in",
    onConfirm() {
      const key = field.value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) throw new Error("A key has only ASCII characters, without spaces. Copy it again.");
      setKey(key);
    },
    cancels: false,
  });
}

async function start() {
  window.addEventListener("hashchange", () => {
    restream(VIEWS[place().name].stream ?? "");
    draw();
    main.focus({ preventScroll: true });
  });
  for (const type of ["click", "input", "change", "submit", "keydown"]) {
    main.addEventListener(type, (event) => {
      const target = event.target.closest("[data-act]");
      if (target && state.fleet) VIEWS[place().name].on?.(type, target.dataset.act, target, event);
      if (type === "submit") event.preventDefault();
      if (target) draw();
    });
  }
  draw();
  setInterval(() => anyStarts() && draw(), 1000);
  state.facts = await (await fetch("facts.json")).json();
  setCalls(state.facts.calls);
  restream(VIEWS[place().name].stream ?? "");
  await askKey(null);
  await follow({
    onMessage(event, data) {
      const news = receive(event, data);
      if (news.length) byId("news").textContent = news.slice(-3).join(" ");
      refreshPlan().then((changed) => changed && draw()).catch(() => {}); // the view shows that there is none
      draw();
    },
    onOpen() {
      reset();
      connected("live", false);
    },
    onLoss: (text) => connected(`${text} Since ${clock(Date.now() / 1000)} the data is out of date; the page reconnects.`, true),
    onKey: askKey,
  });
}

start();
