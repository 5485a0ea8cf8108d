// The admin API and the stream. The key is in this module's memory only: a reload requires it again.

const ADMIN = "../admin/v1"; // a proxy may serve both below a path
const SILENT_MS = 12_000; // without a ping, the stream counts as lost; the controller sends one every 5 s
const RETRY_MS = 1000;

let key = "";
let calls = {}; // the method and the path of each operation of the admin API, by its name
let query = ""; // of the stream
let running = null; // its AbortController

export function setKey(text) {
  key = text;
}

export const hasKey = () => key !== "";

/** An answer that is not a success. */
export class Refusal extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `The controller answered with status ${status}.`);
    this.status = status;
    this.code = body?.error?.code ?? "";
    this.hint = body?.error?.hint ?? "";
    this.problems = body?.problems ?? [];
  }
}

export function request(path, options = {}) {
  const headers = { authorization: `Bearer ${key}`, "x-corewright-by": "console", ...options.headers };
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
}

async function answer(response) {
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refusal(response.status, body);
  return body;
}

/** Sets the operations, as the controller's table of routes has them. */
export function setCalls(table) {
  calls = table;
}

/** Calls an operation of the admin API. Of a GET, fields that the path does not name are the query. */
export async function call(operation, fields = {}) {
  const { method, path } = calls[operation];
  if (method === "POST") {
    const headers = { "content-type": "application/json" };
    return answer(await request(ADMIN + path, { method, body: JSON.stringify(fields), headers }));
  }
  const query = { ...fields };
  const filled = path.replace(/{(\w+)}/g, (_, name) => {
    const value = encodeURIComponent(query[name]);
    delete query[name];
    return value;
  });
  const parameters = new URLSearchParams(query).toString();
  return answer(await request(ADMIN + filled + (parameters && `?${parameters}`)));
}

/** Yields `{event, data}` of a response that is a stream of server-sent events; comments are yielded without data. */
export async function* messages(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n");
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      const named = lines.find((line) => line.startsWith("event:"));
      yield { event: named ? named.slice(6).trim() : "message", data: data.length ? data.join("\n") : null };
    }
  }
}

/** Has the stream send what a view needs beside the status; it is opened again if that differs. */
export function restream(more) {
  if (query === more) return;
  query = more;
  running?.abort("again");
}

/** Follows the fleet and connects again whenever the stream ends. `onLoss(text)` explains, `onKey` asks for a key. */
export async function follow({ onMessage, onOpen, onLoss, onKey }) {
  while (true) {
    const abort = running = new AbortController();
    let silence = setTimeout(() => abort.abort(), SILENT_MS);
    try {
      const response = await request(`stream?${query}`, { signal: abort.signal });
      if (response.status === 401 || response.status === 403) {
        clearTimeout(silence);
        await onKey(new Refusal(response.status, await response.json().catch(() => null)));
        continue;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      onOpen();
      for await (const { event, data } of messages(response)) {
        clearTimeout(silence);
        silence = setTimeout(() => abort.abort(), SILENT_MS);
        if (data !== null) onMessage(event, JSON.parse(data));
      }
      onLoss("The controller has closed the stream.");
    } catch (error) {
      if (abort.signal.reason === "again") continue;
      onLoss(abort.signal.aborted ? "The controller is silent." : `The controller is not reachable: ${error.message}`);
    } finally {
      clearTimeout(silence);
      abort.abort();
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}
