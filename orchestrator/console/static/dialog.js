// The page's one dialog, which the browser keeps on top and closes with Escape.

import { h } from "./dom.js";

const dialog = document.getElementById("dialog");

/** Shows a dialog; resolves to true once `onConfirm` has succeeded, and to false if it is closed without it. A refusal
 *  of `onConfirm` is shown, and the dialog stays. `onOpen(confirm)` gets the button, which it may disable. */
export function openDialog({ title, body, confirm, onConfirm, onOpen, cancels = true, escapes = cancels, danger = false }) {
  const problem = h("p", { class: "problem", role: "alert" });
  const button = h("button", { class: danger ? "primary danger" : "primary", type: "submit" }, confirm);
  const cancel = cancels && h("button", { type: "button" }, "Cancel");
  const form = h("form", { method: "dialog" },
    h("h2", { id: "dialog-title" }, title), h("div", { class: "dialog-body" }, body), problem,
    h("p", { class: "buttons" }, cancel, button));
  dialog.replaceChildren(form);
  return new Promise((resolve) => {
    const close = (outcome) => {
      dialog.oncancel = dialog.onclose = null;
      dialog.close();
      resolve(outcome);
    };
    if (cancel) cancel.onclick = () => close(false);
    dialog.oncancel = (event) => {
      event.preventDefault();
      if (escapes) close(false);
    };
    form.onsubmit = async (event) => {
      event.preventDefault();
      problem.textContent = "";
      button.disabled = true;
      try {
        await onConfirm();
        close(true);
      } catch (error) {
        problem.textContent = [error.message, error.hint].filter(Boolean).join(" ");
        if (!error.previewed) button.disabled = false;
      }
    };
    dialog.showModal();
    onOpen?.(button);
  });
}
