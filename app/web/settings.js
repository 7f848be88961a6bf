// The settings' form: what of it goes into a request, and what outlives a reload of this tab.

const KEPT = "moaserve-playground";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty"];

/** Use this tab's storage, without which the page works too: a browser that keeps no site's data refuses it. */
function attempt(use) {
  try {
    use();
  } catch {
    // Nothing is kept then.
  }
}

export class Settings {
  constructor(form, changed) {
    this.form = form;
    attempt(() => {
      for (const [name, value] of Object.entries(JSON.parse(sessionStorage.getItem(KEPT) ?? "{}"))) this.#write(name, value);
    });
    const keep = () => {
      attempt(() => sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries([...form.elements].filter((each) => each.name).map((each) => [each.name, each.type === "checkbox" ? each.checked : each.value])))));
      changed();
    };
    form.addEventListener("input", keep);
    form.addEventListener("reset", () => {
      const { key } = this;
      setTimeout(() => { // the fields change after the event
        form.elements.api_key.value = key; // which is how one gets in, not a matter of taste
        keep();
      });
    });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  get key() {
    return this.form.elements.api_key.value.trim();
  }

  get shade() {
    return this.form.elements.shade.checked;
  }

  /** The first field that holds what it must not, if any. */
  get wrong() {
    return [...this.form.elements].find((each) => each.willValidate && !each.checkValidity());
  }

  /** The sampling parameters that are set. A seed beyond 2^53 would lose digits as a number, and so is refused by the form. */
  sampling() {
    const given = NUMBERS.filter((name) => this.form.elements[name].value !== "");
    return Object.fromEntries(given.map((name) => [name, this.form.elements[name].valueAsNumber]));
  }

  /** The system prompt as messages: none or one. */
  system() {
    const content = this.form.elements.system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  askForKey() {
    this.form.elements.api_key.focus();
    this.form.elements.api_key.select();
  }

  #write(name, value) {
    const field = this.form.elements[name];
    if (!field) return;
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
}
