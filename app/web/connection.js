// Is the server there, is its model loaded, and does it take our key: looked up again until all three are so.

import { models } from "./api.js";
import { element } from "./dom.js";

const AGAIN_S = 5;

export class Connection {
  #timer = 0;
  #asked = 0;

  /** Fills `select` with the models and `state` with how things are; `keyWanted` is called where the key is to blame. */
  constructor(select, state, keyWanted) {
    Object.assign(this, { select, state, keyWanted });
  }

  /** Ask with `key`; an earlier question that is still open no longer counts. */
  async check(key) {
    clearTimeout(this.#timer);
    this.#asked += 1;
    const asked = this.#asked;
    try {
      const names = await models(key);
      if (asked === this.#asked) this.#show(names);
    } catch (failure) {
      if (asked !== this.#asked) return;
      this.#say(failure.about === "key" ? "API key needed" : failure.retryAfter ? "The model is loading …" : "No connection", failure.retryAfter ? "" : "bad");
      this.state.title = failure.advice;
      if (failure.about === "key") this.keyWanted();
      else this.#timer = setTimeout(() => this.check(key), (failure.retryAfter || AGAIN_S) * 1000);
    }
  }

  #show(names) {
    const chosen = this.select.value;
    this.select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    if (names.includes(chosen)) this.select.value = chosen;
    this.select.disabled = false;
    this.#say("Ready", "ready");
    this.state.title = "";
  }

  #say(words, kind) {
    this.state.className = `state ${kind}`;
    if (this.state.textContent !== words) this.state.textContent = words;
  }
}
