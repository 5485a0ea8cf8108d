// Links into Ray's dashboard, which stays the place for processes.

import { h } from "./dom.js";
import { state } from "./state.js";

/** The actor's page and the log of a replica there; nothing if the fleet runs without the dashboard. */
export function rayLinks(id) {
  const { dashboard, replicas } = state.links;
  const known = replicas[id];
  if (!dashboard || !known) return null;
  const away = { target: "_blank", rel: "noreferrer noopener" };
  return h("p", { class: "links" },
    h("a", { ...away, href: `${dashboard}/#/actors/${known.actor}` }, "Ray: actor"), " ",
    h("a", { ...away, href: `${dashboard}/#/logs/viewer?nodeId=${known.node}&fileName=${encodeURIComponent(known.log)}` },
      "Ray: log"));
}
