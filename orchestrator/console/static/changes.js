// The dialogs of changes by hand: each shows what the controller says it would do, then asks.

import { call } from "./api.js";
import { openDialog } from "./dialog.js";
import { h } from "./dom.js";
import { clock, count } from "./format.js";
import { planResult } from "./plan_result.js";
import { state } from "./state.js";

const VERBS = {
  scale: { title: "Scale" },
  load: { title: "Load" },
  unload: { title: "Unload", danger: true },
  restart: { title: "Restart", danger: true },
  drain: { title: "Drain", danger: true },
};

/** Scales, loads, unloads, restarts or drains `target`, after a preview. */
export async function changeDialog(change, target) {
  const verb = VERBS[change];
  const model = state.models[target];
  const shown = h("div", { class: "preview", role: "status" }, "Asking the controller…");
  let index = null;
  let confirm = null;
  let asked = 0;
  const field = change === "scale" && h("input", { id: "count", type: "number", min: "0", max: String(model.scaling.max),
    value: String(model.wanted), placeholder: "as the spec says" });
  const countOf = () => (field && field.value !== "" ? Number(field.value) : null);

  async function preview() {
    const turn = ++asked;
    confirm.disabled = true;
    try {
      const result = await call("preview", { action: change, target, count: countOf() });
      if (turn !== asked) return;
      index = result.index;
      shown.replaceChildren(...effects(result));
      confirm.disabled = result.refusal !== null;
    } catch (error) {
      if (turn === asked) shown.replaceChildren(h("p", { class: "problem" }, [error.message, error.hint].join(" ")));
    }
  }

  if (field) field.oninput = preview;
  await openDialog({
    title: `${verb.title} ${target}`,
    body: [field && [h("label", { for: "count" }, `Replicas, at most ${model.scaling.max}; empty: as the spec says`), field], shown],
    confirm: verb.title,
    danger: verb.danger,
    onOpen: (button) => {
      confirm = button;
      preview();
    },
    async onConfirm() {
      const about = change === "drain" ? { target } : { model: target };
      const fields = change === "scale" ? { ...about, count: countOf() } : about;
      await changeOrPreview(change, { ...fields, check_index: index }, preview);
    },
  });
}

/** Makes a change; if the fleet has changed since the preview, shows a new one, which also decides on the button. */
async function changeOrPreview(operation, fields, preview) {
  try {
    await call(operation, fields);
  } catch (error) {
    if (error.code === "index-changed") {
      await preview();
      error.previewed = true;
    }
    throw error;
  }
}

function effects(result) {
  const named = result.changes.map((each) => h("li", {}, h("strong", {}, each.change), ` ${each.replica}`, placeOf(result, each.replica)));
  return [
    result.refusal && h("p", { class: "problem" }, result.refusal),
    named.length ? h("ul", { class: "effects" }, named) : h("p", {}, "No replica starts, stops or moves."),
    ...result.strategies.map((each) => h("p", {}, `${each.model}: by ${each.strategy}, `,
      each.outage_s === null ? "outage unknown" : `outage ${each.outage_s.toFixed(1)} s`, `. ${each.why}`)),
    ...result.unplaced.flatMap((each) => each.problems.map((problem) => h("p", { class: "problem" }, `${problem.what}. ${problem.hint ?? ""}`))),
    h("p", { class: "dim" }, `check index ${result.index}`),
  ].filter(Boolean);
}

function placeOf(result, id) {
  const place = result.placements.find((each) => `${each.model}/${each.replica}` === id);
  return place ? ` on ${place.host}, ${place.cores ? `cores ${place.cores}` : "no cores"}` : "";
}

/** Applies an earlier revision again, after its plan. */
export async function rollbackDialog() {
  const [{ revisions }, rollout] = await Promise.all([call("revisions"), call("rollout")]);
  const earlier = revisions.filter((each) => each.revision !== rollout.revision);
  const choice = h("select", { id: "revision" }, earlier.map((each) => h("option", { value: String(each.revision) },
    `${each.revision}: ${each.cause} at ${clock(each.at)} by ${each.by}, ${each.state}`)));
  const suggested = rollout.undo ?? earlier[0]?.revision;
  if (suggested) choice.value = String(suggested);
  const shown = h("div", { class: "preview", role: "status" });
  let shownPlan = null; // what is applied is what is shown
  let confirm = null;
  let asked = 0;
  async function preview() {
    const turn = ++asked;
    confirm.disabled = true;
    if (!choice.value) {
      shown.replaceChildren("There is no earlier revision.");
      return;
    }
    try {
      const to = Number(choice.value);
      const { text, file, base_dir } = await call("revision", { number: to });
      const plan = await call("propose", { text, file, base_dir });
      if (turn !== asked) return;
      shownPlan = { to, check_index: plan.index };
      shown.replaceChildren(...planResult(plan));
      confirm.disabled = false;
    } catch (error) {
      if (turn === asked) shown.replaceChildren(h("p", { class: "problem" }, [error.message, error.hint].join(" ")));
    }
  }
  choice.onchange = preview;
  await openDialog({
    title: `Roll back from revision ${rollout.revision}`,
    body: [h("label", { for: "revision" }, `Apply again one of ${count(earlier.length, "revision")}`), choice, shown],
    confirm: "Roll back",
    danger: true,
    onOpen: (button) => {
      confirm = button;
      preview();
    },
    onConfirm: () => changeOrPreview("undo", shownPlan, preview),
  });
}
