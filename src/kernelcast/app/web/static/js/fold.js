/* The rest of a long table, when it is asked for.

   foldRows(made, first, told) -> [the table, a button with the sentence beside it]; made is answer.js's table(); rows beyond the
   first are hidden, found by the button's id: TABLE-all. */

import { h } from "./dom.js";
import { countText } from "./units.js";

export function foldRows(made, first, told) {
  const rest = [...made.querySelectorAll("tbody tr")].slice(first);
  if (!rest.length) return made;
  for (const line of rest) line.hidden = true;
  const button = h(
    "button.quiet",
    { type: "button", id: `${made.querySelector("table").id}-all` },
    `Show ${countText(rest.length)} more`,
  );
  const more = h("div.more", button, told ? h("p.help", told) : null);
  button.addEventListener("click", () => {
    for (const line of rest) line.hidden = false;
    more.remove();
    made.focus();
  });
  return [made, more];
}
