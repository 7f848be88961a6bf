// Elements, made without any HTML: what a model writes is only ever text.

/** An element with properties, attributes (names with a dash, `role`, `class`) and children. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  set(made, properties);
  made.append(...children);
  return made;
}

/** Copy a text; resolves to whether that worked. Browsers have a `clipboard` only for pages that came by HTTPS or from this machine. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const before = document.activeElement;
    const field = element("textarea", { class: "unseen" });
    field.value = text;
    document.body.append(field);
    field.focus({ preventScroll: true });
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    before.focus({ preventScroll: true });
    return copied;
  }
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for the parts of a picture. */
export function shape(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  set(made, attributes);
  made.textContent = text;
  return made;
}

function set(target, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) target.addEventListener(name.slice(2), value);
    else target.setAttribute(name, value);
  }
}
