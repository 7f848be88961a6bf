// One answer as it comes: its text, and the server's own account of how it is made.

import { chat } from "./api.js";
import { foreign } from "./errors.js";

export class Answer {
  /** All that was written, what the model thought before it answered included. */
  text = "";
  /** The answer alone: what the conversation goes on with. */
  said = "";
  finishReason = null;
  stopped = false;
  failure = null;
  /** The response's metrics.speculative_decoding so far. */
  made = null;

  /** Ask, and tell `watch(origins, edge, thought)` of each chunk's tokens, how an edge came by them, and whether they are thoughts; what goes wrong is kept as `failure`. */
  async run(body, key, signal, watch) {
    try {
      for await (const chunk of chat(body, key, signal)) {
        this.made = chunk.metrics?.speculative_decoding ?? this.made;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        const [origins, content] = [choice.token_origins ?? [], choice.delta.content ?? ""];
        if (chunk.edge?.replace_from !== undefined) this.text = this.said = first(this.said, chunk.edge.replace_from); // there are no thoughts then
        for (const token of origins) this.text += token.text;
        this.said += content;
        this.finishReason = choice.finish_reason;
        watch(origins, chunk.edge, !content);
      }
      if (!this.made) throw foreign("It does not say how it was made.");
    } catch (error) {
      if (error.name === "AbortError") this.stopped = true;
      else this.failure = error;
    }
    watch([]);
  }

  get complete() {
    return this.finishReason !== null;
  }
}

/** A text's first `count` characters as the server counts them, in code points. */
export function first(text, count) {
  return [...text].slice(0, count).join("");
}

/** Where two texts part, in UTF-16 units, or -1 where they are identical. */
export function parting(one, other) {
  if (one === other) return -1;
  let place = 0;
  while (one[place] === other[place]) place += 1;
  return place;
}

/** How often drafts were accepted at least so far: the first place's share, the second's and so on. */
export function acceptanceByPlace(made) {
  const histogram = made.acceptance_histogram;
  const shares = [];
  let most = made.num_spec_steps;
  for (let place = 1; place < histogram.length; place += 1) {
    most -= histogram[place - 1];
    shares.push(most / made.num_spec_steps);
  }
  return shares;
}
