// How often drafts were accepted, by how far ahead they were: bars, drawn by hand.

import { acceptanceByPlace } from "./answer.js";
import { element, shape } from "./dom.js";
import { setPlace } from "./tokens.js";

const NARROWEST = 240;
const HEIGHT = 156;
const LEFT = 40;
const TOP = 18;
const BOTTOM = 18;
const FEWEST = 4;

const percent = (share) => `${Math.round(share * 100)}%`;

/** The figure, empty; `drawPlot` fills it. */
export function plotFigure() {
  return element("figure", { class: "plot" }, element("figcaption"), shape("svg", { role: "img" }));
}

/** Draw what a response's metrics say so far. */
export function drawPlot(figure, made) {
  const [caption, picture] = figure.children;
  const steps = made.num_spec_steps;
  caption.replaceChildren(element("b", {}, "Acceptance by position"), element("span", { class: "hint" }, steps ? `of ${steps} drafts` : "nothing was drafted"));
  const shares = steps ? acceptanceByPlace(made) : [];
  picture.setAttribute("aria-label", shares.length ? shares.map((share, place) => `position ${place + 1}: ${percent(share)}`).join(", ") : "No draft was accepted.");
  const whole = Math.max(NARROWEST, picture.clientWidth); // a unit is a pixel, whatever the room
  picture.setAttribute("viewBox", `0 0 ${whole} ${HEIGHT}`);
  const [width, height] = [whole - LEFT, HEIGHT - TOP - BOTTOM];
  const parts = [0, 0.5, 1].flatMap((share) => {
    const y = TOP + height * (1 - share);
    return [
      shape("line", { class: "grid", x1: LEFT, x2: whole, y1: y, y2: y }),
      shape("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, percent(share)),
    ];
  });
  const room = width / Math.max(FEWEST, shares.length);
  const every = Math.ceil(26 / room); // labels closer than this would run into each other
  shares.forEach((share, place) => {
    const bar = Math.min(room * 0.72, 44);
    const middle = LEFT + room * (place + 0.5);
    const top = TOP + height * (1 - share);
    const drawn = shape("rect", { class: "bar-of", x: middle - bar / 2, y: top, width: bar, height: height * share, rx: Math.min(4, height * share) });
    setPlace(drawn, place + 1);
    parts.push(drawn);
    if (place % every) return;
    parts.push(shape("text", { class: "value", x: middle, y: top - 4, "text-anchor": "middle" }, percent(share)));
    parts.push(shape("text", { x: middle, y: HEIGHT - 3, "text-anchor": "middle" }, place + 1));
  });
  picture.replaceChildren(...parts);
}
