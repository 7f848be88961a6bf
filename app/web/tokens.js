// A text as its tokens, each shaded by where it came from; the further ahead it was drafted, the deeper.
// What an edge's drafter has written alone is marked instead, until the server has verified it or put other tokens in its place.

import { first } from "./answer.js";
import { element } from "./dom.js";

const DEEPEST = 8;
const BLOCK = 100; // tokens: fewer make a page of many blocks, more make each of them dear

/** Shades by how many tokens ahead a token was drafted. */
export function setPlace(target, place) {
  target.style.setProperty("--place", Math.min(place, DEEPEST));
}

/** Laid out in blocks that end where a line of the text does: browsers lay out all of the block that a token is added to. */
export class TokenText {
  #place = 0;
  #places = new Map(); // of tokens whose text may still come, by index
  #last = null;
  #index = -1;
  #indexes = new Map(); // of the tokens that are shown, by their elements
  #alone = []; // what the server has not verified yet

  constructor(box) {
    this.box = box;
  }

  /** Whether tokens are shown that an edge's server has not verified. */
  get unverified() {
    return this.#alone.length > 0;
  }

  /** More of the text: one chunk's `token_origins`, its `edge` if it has that, and whether they are what the model thinks before it answers. */
  add(origins, edge, thought) {
    const revised = edge?.replace_from !== undefined;
    if (revised) this.#cut(edge.replace_from_token, edge.replace_from);
    if (revised || (origins.length && !edge)) for (const token of this.#alone.splice(0)) token.classList.remove("alone");
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
      if (thought) this.#last.classList.add("thought");
      if (edge?.offline) {
        this.#last.classList.add("alone");
        this.#alone.push(this.#last);
      }
      this.#indexes.set(this.#last, index);
      this.#index = index;
      this.#block().append(this.#last);
    }
  }

  /** The block that the next token belongs to. */
  #block() {
    const block = this.box.lastElementChild;
    if (block && !(block.childElementCount >= BLOCK && block.lastElementChild.textContent.endsWith("\n"))) return block;
    return this.box.appendChild(element("div"));
  }

  /** Take back all tokens from number `index` on, and what others have beyond the text's first `count` characters. */
  #cut(index, count) {
    for (const [token, its] of this.#indexes) {
      const text = token.textContent;
      const kept = its < index ? first(text, count) : "";
      count -= [...kept].length;
      if (kept !== text) token.textContent = kept;
      if (kept) continue;
      const block = token.parentNode;
      token.remove();
      if (!block.hasChildNodes()) block.remove();
      this.#indexes.delete(token);
    }
    for (const its of this.#places.keys()) if (its >= index) this.#places.delete(its);
    this.#place = this.#places.get(index - 1) ?? 0;
    this.#index = -1;
  }

  /** Mark the token that holds the text's character number `place`. */
  mark(place) {
    let seen = 0;
    for (const token of this.#indexes.keys()) {
      seen += token.textContent.length;
      if (seen > place) return token.classList.add("differs");
    }
  }
}
