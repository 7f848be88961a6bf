// A text as its tokens, each shaded by where it came from; the further ahead it was drafted, the deeper.

import { element } from "./dom.js";

const DEEPEST = 8;

/** Shades by how many tokens ahead a token was drafted. */
export function setPlace(target, place) {
  target.style.setProperty("--place", Math.min(place, DEEPEST));
}

export class TokenText {
  #place = 0;
  #places = new Map(); // of tokens whose text may still come, by index
  #last = null;
  #index = -1;

  constructor(box) {
    this.box = box;
  }

  /** More of the text: `token_origins` of one chunk. */
  add(origins) {
    const made = document.createDocumentFragment();
    for (const { index, text, origin } of origins) {
      if (!this.#places.has(index)) {
        this.#place = origin === "draft" ? this.#place + 1 : 0;
        this.#places.set(index, this.#place);
      }
      if (!text) continue;
      if (index === this.#index) {
        this.#last.append(text);
        continue;
      }
      this.#last = element("span", { class: `token ${origin === "draft" ? "draft" : "own"}` }, text);
      if (origin === "draft") setPlace(this.#last, this.#places.get(index));
      this.#index = index;
      made.append(this.#last);
    }
    this.box.append(made);
  }

  /** Mark the token that holds the text's character number `place`. */
  mark(place) {
    let seen = 0;
    for (const token of this.box.children) {
      seen += token.textContent.length;
      if (seen > place) return token.classList.add("differs");
    }
  }
}
