// The page: what each control does.

import { Connection } from "./connection.js";
import { element } from "./dom.js";
import { Settings } from "./settings.js";
import { setPlace } from "./tokens.js";
import { Turn } from "./turn.js";

const by = (id) => document.getElementById(id);
const [thread, welcome, composer, prompt, send, spoken] = ["thread", "welcome", "composer", "prompt", "send", "spoken"].map(by);
const [panel, toggle] = [by("settings"), by("toggle-settings")];
const narrow = matchMedia("(max-width: 56rem)"); // as in page.css

const actions = element("div", { class: "actions" }); // of the last turn
const rest = matchMedia("(hover: hover)").matches ? prompt : send; // has the focus while nothing else wants it: a phone's keyboard would cover half the page
const say = (words) => { spoken.textContent = words; };

let turns = [];
let running = null; // what stops the turn that is being answered
let pinned = true;
let left = 0; // where the page was when the settings were gone to
let editing = null; // the turn whose message is being edited in the composer, and the draft that it put aside
let checkedKey = null;
let checking = 0;

const settings = new Settings(by("settings-form"), () => {
  shade();
  clearTimeout(checking);
  if (settings.key !== checkedKey) checking = setTimeout(connect, 400); // once it is typed
});
const connection = new Connection(by("model"), by("state"), () => {
  if (!turns.length) showSettings(true); // a turn that was refused has a button for it, and they would push it out of sight
});

function connect() {
  checkedKey = settings.key;
  connection.check(checkedKey);
}

function shade() {
  document.body.classList.toggle("unshaded", !settings.shade);
}

function showSettings(shown) {
  panel.hidden = !shown;
  toggle.setAttribute("aria-expanded", String(shown));
}

/** On a narrow page the settings stand above the conversation: show them there, and go back to what was read. */
function visitSettings() {
  const seen = !panel.hidden && (!narrow.matches || window.scrollY < panel.offsetHeight / 2);
  if (!seen) left = window.scrollY;
  showSettings(!seen);
  if (narrow.matches) window.scrollTo(0, seen ? left : 0);
}

function askForKey() {
  showSettings(true);
  settings.askForKey();
}

/** What the model is told: the system prompt, the turns that were answered, and what is asked now. */
function messages(asked) {
  const said = turns.filter((turn) => turn.said).flatMap((turn) => [
    { role: "user", content: turn.prompt },
    { role: "assistant", content: turn.said },
  ]);
  return [...settings.system(), ...said, { role: "user", content: asked }];
}

function request(asked, mode) {
  const body = { messages: messages(asked), ...settings.sampling() };
  if (by("model").value && !by("model").disabled) body.model = by("model").value;
  if (mode === "both") body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  return body;
}

/** Whether a setting holds what it must not; it is shown then, and nothing may be asked yet. */
function refusedBySettings() {
  const { wrong } = settings;
  if (wrong) {
    showSettings(true);
    wrong.reportValidity();
  }
  return Boolean(wrong);
}

async function answer(asked) {
  leaveEdit();
  const mode = new FormData(composer).get("speculation");
  const body = request(asked, mode);
  const turn = new Turn(asked, mode, grown, say);
  welcome.hidden = true;
  actions.remove();
  thread.append(turn.article);
  turns.push(turn);
  pinned = true;
  follow();
  setRunning(new AbortController());
  say("Answering.");
  const { signal } = running;
  const said = await turn.run(body, settings.key, signal);
  if (running?.signal === signal) setRunning(null);
  if (turns.includes(turn)) end(turn, said);
}

function end(turn, said) {
  say(said);
  const again = element("button", { type: "button", onclick: () => retry(turn) }, turn.failure ? "Try again" : "Ask again");
  const change = element("button", { type: "button", onclick: () => edit(turn) }, "Edit message");
  if (!turn.failure) {
    for (const button of [again, change]) button.classList.add("small");
    actions.replaceChildren(again, change);
    turn.article.append(actions);
    return follow();
  }
  const key = element("button", { type: "button", onclick: askForKey }, "Enter the key");
  turn.showFailure(...(turn.failure.about === "key" ? [key] : []), again, change);
  connect(); // the server may be gone, or be another by now
}

/** Ask the same anew, or `asked` in its place: what was answered is gone then. */
function retry(turn, asked = turn.prompt) {
  if (running || refusedBySettings()) return;
  leaveEdit();
  turns = turns.filter((each) => each !== turn);
  turn.article.remove();
  rest.focus();
  answer(asked);
}

/** Have a turn's message in the composer, to be sent in its place. */
function edit(turn) {
  if (running) return;
  leaveEdit();
  editing = { turn, draft: prompt.value };
  showEdit(turn.prompt);
  say("Editing the message. Escape cancels.");
}

/** Back to what was being written before, if a message is being edited. */
function leaveEdit() {
  if (!editing) return;
  const { turn, draft } = editing;
  editing = null;
  turn.article.classList.remove("edited");
  showEdit(draft);
}

function showEdit(text) {
  editing?.turn.article.classList.add("edited");
  by("editing").hidden = !editing;
  prompt.value = text;
  prompt.focus();
}

function setRunning(controller) {
  running = controller;
  send.textContent = controller ? "Stop" : "Send";
  send.classList.toggle("stop", Boolean(controller));
  thread.setAttribute("aria-busy", String(Boolean(controller)));
}

/** What the page has to do whenever there are other tokens on it. A `:has()` in the stylesheet would look at all of them each time. */
function grown() {
  document.body.classList.toggle("unverified", turns.some((turn) => turn.unverified));
  follow();
}

/** Keep the end in view, unless the reader has gone back. */
function follow() {
  if (pinned) window.scrollTo(0, document.documentElement.scrollHeight);
}

window.addEventListener("scroll", () => {
  const page = document.documentElement;
  pinned = page.scrollHeight - page.clientHeight - window.scrollY < 40;
});

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const asked = prompt.value.trim();
  if (!asked) return prompt.focus();
  if (refusedBySettings()) return;
  if (editing) return retry(editing.turn, asked);
  prompt.value = "";
  answer(asked);
});

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return; // 229: Safari's, at a composition's end
  event.preventDefault();
  if (!running) composer.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (running) running.abort();
  else if (panel.contains(document.activeElement)) {
    showSettings(false);
    toggle.focus();
  } else leaveEdit();
});

by("cancel-edit").addEventListener("click", leaveEdit);

toggle.addEventListener("click", visitSettings);

by("new").addEventListener("click", () => {
  running?.abort();
  setRunning(null);
  leaveEdit();
  for (const turn of turns) turn.article.remove();
  turns = [];
  grown();
  welcome.hidden = false;
  say("A new chat.");
  prompt.focus();
});

by("examples").addEventListener("click", (event) => {
  if (event.target.localName !== "button" || running || refusedBySettings()) return;
  rest.focus();
  answer(event.target.textContent);
});

setPlace(by("draft-sample"), 3);
shade();
connect();
if (rest === prompt) prompt.focus();
