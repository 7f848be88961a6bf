// What two answers to the same prompt, with the same seed, say together.

import { parting } from "./answer.js";
import { element } from "./dom.js";

/** A comparison: `ratio` of speeds (null where there is none), `parts` where the texts part (-1: nowhere, null: not compared). */
export function compare(speculative, plain) {
  const comparable = speculative.complete && plain.complete;
  const [fast, slow] = [speculative.made?.tokens_per_second, plain.made?.tokens_per_second];
  return {
    ratio: comparable && fast && slow ? fast / slow : null,
    parts: comparable ? parting(speculative.text, plain.text) : null,
    calls: comparable ? [speculative.made.num_target_calls, plain.made.num_target_calls] : null,
  };
}

/** The same in a sentence, for those who hear the page. */
export function sentence({ ratio, parts }) {
  if (parts === null) return "The texts are not compared: one of them is not complete.";
  const same = parts < 0 ? "The texts are identical." : `The texts differ from character ${parts + 1} on.`;
  return ratio === null ? same : `${ratio.toFixed(2)} times as fast with speculation. ${same}`;
}

/** And on a card. */
export function verdictCard(comparison, seed) {
  const { ratio, parts, calls } = comparison;
  const card = element("div", { class: "verdict" });
  if (ratio !== null) card.append(element("p", { class: "ratio" }, element("b", {}, `${ratio.toFixed(2)}×`), element("span", {}, "as fast with speculation")));
  if (parts === null) {
    card.append(element("p", { class: "hint" }, "Not compared: one of the answers is not complete."));
    return card;
  }
  card.append(element("p", { class: parts < 0 ? "same" : "different" }, parts < 0 ? "The texts are identical" : `The texts differ from character ${parts + 1} on`));
  if (parts >= 0) card.append(element("p", { class: "hint" }, "In bfloat16 two tokens may be equally likely up to rounding, and which is taken then depends on how many are computed at once. Serve with --dtype float32 to compare exactly."));
  card.append(element("p", { class: "hint" }, `${calls[0]} target calls instead of ${calls[1]} · seed ${seed}`));
  return card;
}
