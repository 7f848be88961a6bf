// One turn on the page: what was asked, one answer or two, and how they were made.

import { Answer } from "./answer.js";
import { copy, element } from "./dom.js";
import { drawPlot, plotFigure } from "./plot.js";
import { TokenText } from "./tokens.js";
import { compare, sentence, verdictCard } from "./verdict.js";

const NAMES = { on: "With speculation", off: "Without speculation" };

export class Turn {
  /** `mode` is "on", "off" or "both"; `changed` is called whenever the page has grown, and `say` with what those who hear the page shall know. */
  constructor(prompt, mode, changed, say) {
    this.prompt = prompt;
    this.views = (mode === "both" ? ["on", "off"] : [mode]).map((one) => new AnswerView(one, mode === "both", say));
    this.outcome = element("div", { class: "outcome", hidden: "" });
    this.plot = plotFigure();
    const answers = element("div", { class: "answers" }, ...this.views.map((view) => view.card));
    this.article = element("article", { class: mode === "both" ? "turn two" : "turn one", "aria-label": prompt.slice(0, 80) }, element("p", { class: "asked" }, prompt), answers, this.outcome);
    this.changed = changed;
  }

  /** The first answer: what the conversation goes on with. */
  get said() {
    return this.views[0].answer.said;
  }

  get unverified() {
    return this.views.some((view) => view.text.unverified);
  }

  get failure() {
    return this.views.map((view) => view.answer.failure).find(Boolean);
  }

  /** Answer, two answers one after the other: together each would slow the other down. Resolves to what to say of it. */
  async run(body, key, signal) {
    for (const view of this.views) {
      if (signal.aborted || this.failure) view.skip();
      else await view.run(view.mode === "on" ? body : { ...body, speculative: false }, key, signal, () => this.#draw(view));
    }
    const [first, second] = this.views.map((view) => view.answer);
    if (this.failure) return "";
    if (!second) return first.stopped ? "Stopped." : `Answered in ${first.made.num_target_calls} target calls.`;
    const comparison = compare(first, second);
    if (comparison.parts >= 0) for (const view of this.views) view.text.mark(comparison.parts);
    this.outcome.append(verdictCard(comparison, body.seed));
    this.changed();
    return first.stopped || second.stopped ? "Stopped." : sentence(comparison);
  }

  /** Show what went wrong, with buttons that help. */
  showFailure(...buttons) {
    const { advice, detail } = this.failure;
    const said = detail && !advice.includes(detail) ? [element("small", {}, detail)] : [];
    const notice = element("div", { class: "notice", role: "alert" }, element("p", {}, advice), ...said, ...buttons);
    this.views.find((view) => view.answer.failure).card.append(notice);
    this.changed();
  }

  #draw(view) {
    if (view.mode === "on" && view.answer.made) {
      this.outcome.hidden = false;
      if (!this.plot.isConnected) this.outcome.append(this.plot);
      drawPlot(this.plot, view.answer.made);
    }
    this.changed();
  }
}

class AnswerView {
  answer = new Answer();
  #chunks = [];
  #frame = 0;

  constructor(mode, waits, say) {
    this.mode = mode;
    this.speed = element("p", { class: "speed" });
    this.box = element("div", { class: "text waiting" }, waits && mode === "off" ? "Waits for the other, so that neither slows the other down." : "…");
    this.text = new TokenText(this.box);
    this.numbers = element("dl", { class: "numbers" });
    this.copy = element("button", { type: "button", class: "small", hidden: "", onclick: () => this.#copy(say) }, "Copy");
    this.foot = element("footer", { hidden: "" }, this.numbers, this.copy);
    this.card = element("section", { class: "answer", "aria-label": NAMES[mode] }, element("header", {}, element("h2", {}, NAMES[mode]), this.speed), this.box, this.foot);
  }

  /** Ask and show; the page is drawn at most once a frame, however fast the chunks come. */
  async run(body, key, signal, drawn) {
    this.card.classList.add("running");
    this.box.textContent = "…";
    const draw = () => {
      this.#frame = 0;
      this.#draw();
      drawn();
    };
    await this.answer.run(body, key, signal, (...chunk) => {
      this.#chunks.push(chunk);
      this.#frame ||= requestAnimationFrame(draw);
    });
    cancelAnimationFrame(this.#frame);
    this.card.classList.remove("running");
    draw();
    this.copy.hidden = !this.answer.said;
    if (!this.answer.text) this.#say(this.answer.failure ? "" : this.answer.stopped ? "Stopped before the first word." : "An empty answer.");
  }

  /** Say that there will be no answer. */
  skip() {
    this.#say("Not decoded.");
  }

  /** Copy the answer, without what the model thought before it. */
  async #copy(say) {
    const outcome = (await copy(this.answer.said)) ? "Copied" : "Not copied";
    this.copy.textContent = outcome;
    say(`${outcome}.`);
    setTimeout(() => (this.copy.textContent = "Copy"), 2000);
  }

  #say(words) {
    this.box.classList.add("waiting");
    this.box.textContent = words;
    this.box.hidden = !words;
  }

  #draw() {
    if (this.#chunks.some(([origins]) => origins.some((each) => each.text)) && this.box.classList.contains("waiting")) {
      this.box.classList.remove("waiting");
      this.box.replaceChildren();
    }
    for (const chunk of this.#chunks) this.text.add(...chunk);
    this.#chunks = [];
    const { made, stopped, finishReason } = this.answer;
    if (!made) return;
    if (made.tokens_per_second) this.speed.replaceChildren(element("b", {}, made.tokens_per_second.toFixed(made.tokens_per_second < 10 ? 1 : 0)), " tokens/s");
    const rows = [
      ["τ", made.mean_acceptance_length.toFixed(2), "tokens gained by a verification, on average"],
      ["target calls", made.num_target_calls],
      ...(made.num_draft_tokens ? [["accepted", `${made.num_accepted_draft_tokens} of ${made.num_draft_tokens} drafted`]] : []),
      ...(stopped || finishReason === "length" ? [["ended", stopped ? "stopped" : "at max tokens"]] : []),
    ];
    this.foot.hidden = false;
    this.numbers.replaceChildren(...rows.map(([name, value, title]) => element("div", title ? { title } : {}, element("dt", {}, name), element("dd", {}, String(value)))));
  }
}
