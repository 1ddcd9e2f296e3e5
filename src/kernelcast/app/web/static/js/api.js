/* Questions to the server.

   get("gpus")                     A list that does not change while the page is open: asked once, then kept.
   ask("infer", body, "model")     A forecast: {answer, command, python}. A new question in the same slot (third argument)
                                   aborts the one before, which then rejects with STALE: leave it alone.
   send("diagnose?…", file, slot)  The same with raw bytes as the body.
   stop(slot)                      Aborts what is asked in a slot (the server stops its work); it rejects with STALE.
   Problem                         What went wrong: .status (0: no answer at all), .title, .detail in words to show. */

const BASE = "/api/v1/";
const GONE = "The server does not answer. Is kernelcast web still running?";
export const STALE = Symbol("a newer question took its place");

export class Problem extends Error {
  constructor(status, title, detail) {
    super(detail);
    Object.assign(this, { status, title, detail });
  }
}

async function answered(path, options) {
  let response;
  try {
    response = await fetch(BASE + path, options);
  } catch (error) {
    if (error.name === "AbortError") throw STALE;
    throw new Problem(0, "No answer", GONE);
  }
  let body = null;
  try {
    body = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw STALE;
  }
  if (response.ok && body !== null) return body;
  const detail =
    body?.detail ??
    (response.ok ? "The server's answer could not be read." : `The server answered ${response.status}.`);
  throw new Problem(
    response.status,
    body?.title ?? "Error",
    typeof detail === "string" ? detail : JSON.stringify(detail),
  );
}

const kept = new Map();

export function get(path) {
  if (!kept.has(path)) {
    const request = answered(path, { headers: { Accept: "application/json" } });
    kept.set(path, request);
    request.catch(() => kept.delete(path)); // asked again next time
  }
  return kept.get(path);
}

const running = new Map();

function inSlot(slot, path, options) {
  running.get(slot)?.abort();
  const control = new AbortController();
  running.set(slot, control);
  return answered(path, { method: "POST", signal: control.signal, ...options }).finally(() => {
    if (running.get(slot) === control) running.delete(slot);
  });
}

export const stop = (slot) => running.get(slot)?.abort();

export const ask = (path, body, slot = path) =>
  inSlot(slot, path, { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

export const send = (path, bytes, slot = path) =>
  inSlot(slot, path, { headers: { "Content-Type": "application/octet-stream" }, body: bytes });
