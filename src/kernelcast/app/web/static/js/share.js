/* The same question elsewhere: "Copy as command", "Copy as Python", "Copy link", with a confirmation that is also spoken.

   sharing(results, …buttons) -> {element, set({command, python, link})}   set it with every envelope of the server, and the address that
                                                      the answer was asked by; null while there is none. results: what
                                                      has tables and charts to download; buttons: beside the others.
   copyButton(name, label, text)                      a button that copies what text() gives. */

import { announce, fill, h } from "./dom.js";
import { downloads } from "./downloads.js";
import { flush } from "./state.js";

const CONFIRM_MS = 1800;

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea.unseen", { "aria-hidden": "true", value: text }); // where the clipboard is not allowed
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function copyButton(name, label, text) {
  const element = h("button.quiet", { type: "button", id: `copy-${name}` }, label);
  element.addEventListener("click", async () => {
    const done = await copy(text());
    fill(element, done ? "Copied" : "Not copied");
    element.classList.toggle("done", done);
    announce(done ? `${label}: copied` : "The browser did not let this page copy");
    setTimeout(() => {
      fill(element, label);
      element.classList.remove("done");
    }, CONFIRM_MS);
  });
  return element;
}

export function sharing(results = null, ...more) {
  let now = null;
  const command = h("code#command");
  const buttons = [
    copyButton("command", "Copy as command", () => now?.command ?? ""),
    copyButton("python", "Copy as Python", () => now?.python ?? ""),
    copyButton("link", "Copy link", () => {
      flush();
      return now?.link ?? location.href;
    }),
  ];
  const files = results ? downloads(results, () => now?.answer ?? null) : null;
  const shown = h("pre.command", { tabindex: "0", "aria-label": "The same question as a command" }, command);
  const element = h("section.share", { "aria-label": "Share" }, shown, h("div.buttons", buttons, more), files);
  return {
    element,
    set(envelope) {
      now = envelope;
      if (files) [files.open, files.hidden] = [false, !envelope];
      for (const button of more) button.disabled = !envelope;
      fill(command, envelope?.command ?? "");
      shown.hidden = !envelope;
      buttons[0].disabled = !envelope?.command;
      buttons[1].disabled = !envelope?.python; // some answers have no words of Python
    },
  };
}
