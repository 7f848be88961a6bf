"""The playground in Chromium, against real servers with the bundled pair."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.integration.conftest import Server, start_server, stop_server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"),
]

WHO = "Hi, who are you?"
LONG = "Tom has 5 boxes with 12 pencils each. He gives away 17 pencils. How many are left?"
CHAT = "**/v1/chat/completions"
expect.set_options(timeout=60_000)

UNREADABLE = """() => {
  const brush = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (color) => {
    brush.fillStyle = color;
    brush.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...brush.getImageData(0, 0, 1, 1).data].map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" && node.parentElement ? ground(node.parentElement) : color;
  };
  const wrong = [];
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
    if (!own || !node.getClientRects().length || node.closest(".unseen, noscript")) continue;
    const style = getComputedStyle(node);
    const both = [luminance(node instanceof SVGElement ? style.fill : style.color), luminance(ground(node))];
    const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    if (contrast < 4.5) wrong.push([node.className, node.textContent, contrast]);
  }
  return wrong;
}"""


# The page itself watches, from before it asks: an answer may begin and end between two glances from outside.
WATCH = """(tokens) => {
  window.streamed = false;
  new MutationObserver(() => {
    window.streamed ||= document.querySelectorAll(tokens).length > 2;
  }).observe(document.body, { childList: true, subtree: true });
}"""


@dataclass
class Visit:
    """A page, and what it did besides showing: requests, errors in its console."""

    page: Page
    base: str
    errors: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)

    def opened(self) -> Visit:
        self.page.goto(self.base + "/")
        return self

    def ready(self) -> Visit:
        expect(self.opened().page.locator("#state")).to_have_text("Ready")
        return self

    def locked(self) -> Visit:
        """Opened where a key is wanted, and past the moment at which the page opens the settings by itself."""
        expect(self.opened().page.locator("#state")).to_have_text("API key needed")
        return self

    def setting(self, name: str, value: str) -> Visit:
        panel = self.page.get_by_role("complementary", name="Settings")
        if not panel.is_visible():
            self.page.get_by_role("button", name="Settings").click()
        panel.get_by_label(name).fill(value)
        return self

    def send(self, prompt: str, mode: str = "On") -> None:
        self.page.get_by_role("radio", name=mode, exact=True).check()
        self.page.get_by_label("Message").fill(prompt)
        self.page.get_by_role("button", name="Send").click()

    def finished(self) -> None:
        expect(self.page.get_by_role("button", name="Send")).to_be_visible()

    @contextmanager
    def streamed(self, answer: str = ".answer") -> Iterator[None]:
        """Whoever sends in here has some tokens of ``answer`` shown while the others are yet to come."""
        self.page.evaluate(WATCH, f"{answer}.running .token")
        yield
        self.finished()
        assert self.page.evaluate("window.streamed")

    def texts(self) -> list[str]:
        return self.page.locator(".answer .text").all_text_contents()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """One that wants a key, and lets nobody wait."""
    server = start_server("--dtype", "float32", "--api-key", "right", "--max-num-seqs", "1", "--max-queue-requests", "0")
    yield server
    stop_server(server)


def visiting(browser: Browser, server: Server, **context: Any) -> Iterator[Visit]:
    """A visit, after which nothing may have been asked of others, and nothing may have gone wrong unseen."""
    opened = browser.new_context(**context)
    page = opened.new_page()
    visit = Visit(page, server.root_url)
    page.on("pageerror", lambda error: visit.errors.append(str(error)))
    page.on("request", lambda request: visit.asked.append(request.url))
    page.on("request", lambda request: visit.sent.append(json.loads(request.post_data)) if request.post_data else None)

    def heard(message: Any) -> None:
        if message.type in ("error", "warning"):
            refused = message.text.startswith("Failed to load resource")  # Chromium itself says so of every 4xx
            (visit.refusals if refused else visit.errors).append(message.text)

    page.on("console", heard)
    yield visit
    opened.close()
    assert visit.errors == []
    assert [url for url in visit.asked if not url.startswith(server.root_url + "/")] == []


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Visit]:
    yield from visiting(browser, server)


@pytest.fixture
def guarded_visit(browser: Browser, guarded: Server) -> Iterator[Visit]:
    yield from visiting(browser, guarded)


def test_a_chat_is_streamed_and_is_what_the_api_answers(visit: Visit, server: Server) -> None:
    page = visit.ready().page
    visit.setting("Temperature", "0").setting("System prompt", "Be kind.")
    with visit.streamed():
        visit.send(LONG)
    visit.send("Can you help me?")
    visit.finished()
    told = [{"role": "system", "content": "Be kind."}]
    for asked, shown in zip((LONG, "Can you help me?"), visit.texts(), strict=True):
        told.append({"role": "user", "content": asked})
        body = {"messages": told, "temperature": 0, "speculative": False}
        choice = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=60).json()["choices"][0]
        assert shown == choice["message"]["content"]
        told.append({"role": "assistant", "content": shown})
    assert page.locator(".token.draft").count() > page.locator(".token.own").count() > 0
    assert [sent["messages"] for sent in visit.sent] == [told[:2], told[:4]]
    assert visit.refusals == []


def test_side_by_side_says_what_is_so(visit: Visit) -> None:
    page = visit.ready().page
    with visit.streamed("[aria-label='Without speculation']"):
        visit.send(LONG, "Side by side")
    plain = page.get_by_role("region", name="Without speculation")
    speculative = page.get_by_role("region", name="With speculation")
    one, other = visit.texts()
    assert one == other
    expect(page.locator(".verdict")).to_contain_text("The texts are identical")
    assert re.fullmatch(r"\d+\.\d\d×", page.locator(".ratio b").inner_text())
    assert speculative.locator(".draft").count() > 0
    assert plain.locator(".draft").count() == 0
    assert [sent.get("speculative") for sent in visit.sent] == [None, False]
    assert visit.sent[0] | {"speculative": None} == visit.sent[1] | {"speculative": None}
    assert isinstance(visit.sent[0]["seed"], int)
    calls = [int(region.locator("dd").nth(1).inner_text()) for region in (speculative, plain)]
    assert calls[0] < calls[1]
    shown = page.get_by_role("img", name="position 1:").get_attribute("aria-label") or ""
    shares = [int(share) for share in re.findall(r"(\d+)%", shown)]
    assert shares == sorted(shares, reverse=True) and 0 < shares[0] <= 100
    assert visit.refusals == []


def test_texts_that_differ_are_said_to_differ_and_where(visit: Visit) -> None:
    page = visit.ready().page
    texts = iter(("one two", "one too"))

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=_stream(*next(texts).partition(" ")))

    page.route(CHAT, answer)
    visit.send(WHO, "Side by side")
    expect(page.locator(".verdict")).to_contain_text("The texts differ from character 6 on")
    assert page.locator(".differs").all_inner_texts() == ["two", "too"]


def test_what_a_model_writes_is_never_html(visit: Visit) -> None:
    page = visit.ready().page
    hostile = "<img src=x onerror=alert(1)>", "</div><script>alert(2)</script>"
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=_stream(*hostile)))
    visit.send("<b>bold</b>")
    visit.finished()
    assert visit.texts() == ["".join(hostile)]
    assert page.locator(".asked").inner_text() == "<b>bold</b>"
    assert page.locator("#thread img, #thread script, #thread b:not(.speed b, figcaption b)").count() == 0


def _stream(*texts: str) -> str:
    """A stream of these tokens, the first of them drafted."""
    metrics = {"mean_acceptance_length": 2, "acceptance_histogram": [0, 1], "num_spec_steps": 1, "num_accepted_draft_tokens": 1}
    metrics |= {"num_draft_tokens": 4, "num_target_calls": 2, "tokens_per_second": 50}
    origins = [{"index": place, "text": text, "origin": "target" if place else "draft"} for place, text in enumerate(texts)]
    choices = [
        {"delta": {"content": "".join(texts)}, "token_origins": origins, "finish_reason": None},
        {"delta": {}, "finish_reason": "stop"},
    ]
    chunks = [{"choices": [choice], "metrics": {"speculative_decoding": metrics}} for choice in choices]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ": a comment\n\ndata: [DONE]\n\n"


def test_thoughts_are_shown_as_such_and_are_no_part_of_the_conversation(visit: Visit) -> None:
    page = visit.ready().page
    first, end = _stream("").split("\n\n", 1)
    tokens = [
        ("<think>", {"content": ""}),
        ("Hm", {"reasoning_content": "Hm"}),
        ("</think>", {"content": ""}),
        ("Yes", {"content": "Yes"}),
    ]

    def streamed(amid: bool) -> str:
        told = []
        for index, (text, delta) in enumerate(tokens[: 2 if amid else None]):
            chunk = json.loads(first.removeprefix("data: "))
            chunk["choices"][0] |= {"delta": delta, "token_origins": [{"index": index, "text": text, "origin": "draft"}]}
            told.append(f"data: {json.dumps(chunk)}\n\n")
        return "".join(told) + end

    bodies = iter((streamed(amid=False), streamed(amid=True), streamed(amid=False)))
    asked = []

    def answer(route: Route) -> None:
        asked.append(route.request.post_data_json["messages"])
        route.fulfill(content_type="text/event-stream", body=next(bodies))

    page.route(CHAT, answer)
    for text in ("<think>Hm</think>Yes", "<think>Hm"):
        visit.send(WHO)
        visit.finished()
        assert visit.texts()[-1] == text
    assert page.locator(".text .thought").all_inner_texts() == ["<think>", "Hm", "</think>", "<think>", "Hm"]
    visit.send(WHO)
    visit.finished()
    assert asked[2] == [{"role": "user", "content": WHO}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": WHO}]


ANSWERED_HERE = """() => {
  const others = window.fetch;
  window.fetch = (url, options) => {
    if (!String(url).endsWith("/chat/completions")) return others(url, options);
    window.asked = JSON.parse(options.body);
    return Promise.resolve(new Response(new ReadableStream({ start(controller) { window.answer = controller; } })));
  };
}"""
TELL = "(chunks) => window.answer.enqueue(new TextEncoder().encode(chunks))"
OFFLINE = {"offline": True}


def _chunk(*tokens: tuple[int, str], **extra: Any) -> str:
    """A chunk of a stream with these drafted tokens, each with its index."""
    origins = [{"index": index, "text": text, "origin": "draft"} for index, text in tokens]
    delta = {"content": "".join(text for _, text in tokens)}
    chunk = json.loads(_stream("").split("\n\n")[0].removeprefix("data: ")) | extra
    chunk["choices"][0] |= {"delta": delta, "token_origins": origins}
    return f"data: {json.dumps(chunk)}\n\n"


def _correction(character: int, token: int) -> dict[str, Any]:
    return {"offline": False, "replace_from": character, "replace_from_token": token}


def test_what_was_written_without_the_server_is_marked_until_it_is_put_right(visit: Visit) -> None:
    page = visit.ready().page
    page.evaluate(ANSWERED_HERE)
    tokens, marked, legend = page.locator(".text .token"), page.locator(".text .alone"), page.locator(".legend .alone")
    end = _stream().partition("\n\n")[2]

    visit.send(WHO)
    page.evaluate(TELL, _chunk((0, "👋🏽"), (1, " Hello")))
    expect(tokens).to_have_count(2)
    expect(legend).to_be_hidden()
    for index, text in enumerate((" the", "re", " 🙂"), 2):
        page.evaluate(TELL, _chunk((index, text), edge=OFFLINE))
    expect(marked).to_have_count(3)
    assert marked.all_inner_texts() == [" the", "re", " 🙂"]
    expect(legend).to_be_visible()
    assert marked.first.evaluate("node => getComputedStyle(node).textDecorationStyle") == "dotted"
    # Of a token that stays the text is told anew in part. Characters are Unicode's, not UTF-16's.
    page.evaluate(TELL, _chunk((2, "hem"), (3, " y"), edge=_correction(10, 3)))
    expect(marked).to_have_count(0)
    expect(legend).to_be_hidden()
    assert tokens.all_inner_texts() == ["👋🏽", " Hello", " t", "hem", " y"]
    # A correction that is drawn with what it corrects, and an end of which there is nothing to tell.
    page.evaluate(TELL, _chunk((4, "ou"), edge=OFFLINE) + _chunk((4, "es"), edge=_correction(15, 4)))
    page.evaluate(TELL, _chunk((5, "!"), edge=OFFLINE) + _chunk(edge=_correction(17, 5)) + end)
    visit.finished()
    assert visit.texts() == ["👋🏽 Hello them yes"]
    assert marked.count() == 0

    visit.send(WHO)
    page.evaluate(TELL, _chunk((0, "Right"), edge=OFFLINE) + _chunk((1, ".")))
    expect(tokens).to_have_count(len(["👋🏽", " Hello", " t", "hem", " y", "es"]) + 2)
    assert marked.count() == 0
    page.evaluate(TELL, _chunk((2, " So"), edge=OFFLINE) + end)
    visit.finished()
    assert marked.all_inner_texts() == [" So"]
    assert page.evaluate("window.asked.messages[1]") == {"role": "assistant", "content": "👋🏽 Hello them yes"}


def test_a_token_is_laid_out_with_few_others_and_the_text_is_one_all_the_same(visit: Visit) -> None:
    page = visit.ready().page
    page.evaluate(ANSWERED_HERE)
    texts = [("word ", "dear ", "end.\n", "\n")[place % 4] for place in range(1000)] + ["Bye"]
    visit.send(WHO)
    page.evaluate(TELL, _chunk(*enumerate(texts)))
    expect(page.locator(".text .token")).to_have_count(1001)
    # A token's block is what a browser lays out anew when the token is added.
    sizes = page.locator(".text .token").evaluate_all("nodes => nodes.map(node => node.parentNode.childElementCount)")
    assert max(sizes) <= 110
    selected = "(getSelection().selectAllChildren(document.querySelector('.text')), getSelection().toString())"
    assert page.evaluate(selected) == "".join(texts)
    assert visit.texts() == ["".join(texts)]
    # Cut off within a line, far above the end, the text goes on in that line.
    kept = "".join(texts[:201])
    page.evaluate(TELL, _chunk((201, "hello"), edge=_correction(len(kept), 201)) + _stream().partition("\n\n")[2])
    visit.finished()
    assert visit.texts() == [kept + "hello"]
    places = page.locator(".text .token").evaluate_all("nodes => nodes.slice(-2).map(node => node.getBoundingClientRect().y)")
    assert places[0] == places[1]


def _without_end(route: Route) -> None:
    """Have an answer go on past its end: a busy browser takes longer to press a button than a short one lasts."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping_ends_the_request_and_keeps_the_text(visit: Visit, server: Server, how: str) -> None:
    page = visit.ready().page
    page.route(CHAT, _without_end)
    visit.setting("Temperature", "0")
    visit.send(LONG, "Off")
    expect(page.locator(".token").nth(10)).to_be_visible()
    if how == "key":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    visit.finished()
    expect(page.locator(".numbers")).to_contain_text("stopped")
    deadline = time.monotonic() + 30
    while server.metric("moaserve_num_requests_running"):
        assert time.monotonic() < deadline, "the request goes on"
    [text] = visit.texts()
    page.get_by_label("Message").fill("And now?")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".turn")).to_have_count(2)
    page.keyboard.press("Escape")
    visit.finished()
    assert visit.texts()[0] == text
    assert visit.sent[1]["messages"][1] == {"role": "assistant", "content": text}


def test_a_wrong_key_is_said_to_be_wrong_and_the_right_one_helps(guarded_visit: Visit) -> None:
    visit = guarded_visit
    page = visit.locked().page
    page.get_by_role("button", name="Settings").click()
    with page.expect_response("**/v1/models"):  # asked again after the refusal
        visit.send(WHO)
    expect(page.get_by_role("alert")).to_contain_text("This server wants an API key. Enter it in the settings.")
    page.evaluate("fetch('v1/models').then((answer) => answer.text())")  # by then the page has read its own answer too
    expect(page.get_by_label("API key")).to_be_hidden()
    visit.setting("API key", "wrong")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("The server does not accept this API key. Correct it in the settings.")
    page.get_by_role("button", name="Enter the key").click()
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("right")  # what stood there is selected
    expect(page.locator("#state")).to_have_text("Ready")
    page.get_by_role("button", name="Try again").click()
    visit.finished()
    assert page.get_by_role("alert").count() == 0
    assert len(visit.texts()) == 1 and visit.texts()[0]
    assert all("401" in refusal for refusal in visit.refusals)
    assert not any("right" in url for url in visit.asked)
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    expect(page.locator("#state")).to_have_text("Ready")  # kept for this tab


def test_a_full_queue_and_a_lost_connection_say_what_to_do(guarded_visit: Visit, guarded: Server) -> None:
    visit = guarded_visit
    page = visit.locked().page
    visit.setting("API key", "right")
    expect(page.locator("#state")).to_have_text("Ready")
    body = {"messages": [{"role": "user", "content": LONG}], "ignore_eos": True, "temperature": 0, "stream": True}
    headers = {"Authorization": "Bearer right"}
    with httpx.stream("POST", f"{guarded.base_url}/chat/completions", json=body, headers=headers, timeout=60) as other:
        lines = other.iter_lines()
        next(lines)  # it has the only slot
        visit.send(WHO)
        expect(page.get_by_role("alert")).to_contain_text("Too many requests for now. Try again in 5 s.")
    while guarded.metric("moaserve_num_requests_running"):
        pass
    page.context.set_offline(True)
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    page.context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    visit.finished()
    assert page.get_by_role("alert").count() == 0
    assert len(visit.texts()) == 1 and visit.texts()[0]


def test_a_model_that_loads_is_waited_for(visit: Visit) -> None:
    page = visit.page
    error = {"message": "The model is still loading, or the server is shutting down.", "code": "service_unavailable"}
    loading = {"status": 503, "headers": {"Retry-After": "1"}, "json": {"error": error}}
    page.route(CHAT, lambda route: route.fulfill(**loading), times=1)
    page.route("**/v1/models", lambda route: route.fulfill(**loading), times=1)
    visit.opened()
    expect(page.locator("#state")).to_have_text("The model is loading …")
    expect(page.locator("#state")).to_have_text("Ready")
    visit.send(WHO)
    expect(page.get_by_role("alert")).to_contain_text("The server cannot answer for now. Try again in 1 s.")
    expect(page.get_by_role("alert")).to_contain_text("The model is still loading, or the server is shutting down.")
    page.get_by_role("button", name="Try again").click()
    visit.finished()
    assert visit.texts()[0]


def test_after_a_failure_the_page_finds_out_whether_the_server_is_gone_or_another(visit: Visit) -> None:
    page = visit.ready().page
    page.context.set_offline(True)
    visit.send(WHO)
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    expect(page.locator("#state")).to_have_text("No connection")
    page.context.set_offline(False)
    expect(page.locator("#state")).to_have_text("Ready")
    error = {"error": {"message": "The model 'concierge' does not exist.", "code": "model_not_found"}}
    page.route(CHAT, lambda route: route.fulfill(status=404, json=error), times=1)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "another"}]}))
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("This model is no longer served. Choose another, then try again.")
    expect(page.get_by_label("Model")).to_have_value("another")


def test_an_answer_that_breaks_off_is_said_to(visit: Visit) -> None:
    page = visit.ready().page
    body = _stream("cut").split("data: [DONE]")[0]
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)
    visit.send(WHO)
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    error = {"error": {"message": "the engine failed", "type": "server_error", "param": None, "code": "internal_error"}}
    body = _stream("cut").split("\n\n")[0] + f"\n\ndata: {json.dumps(error)}\n\ndata: [DONE]\n\n"
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("The server failed.")
    assert visit.texts() == ["cut"]


@pytest.mark.parametrize(
    ("status", "kind", "body", "advice"),
    [
        (200, "text/html", "<p>Sign in</p>", "What answers here is not this server’s API."),
        (200, "text/event-stream", "data: <p>\n\n", "What answers here is not this server’s API."),
        (200, "text/event-stream", 'data: {"id": 1}\n\n', "The server cannot be reached."),
        (200, "text/event-stream", 'data: {"id": 1}\n\ndata: [DONE]\n\n', "What answers here is not this server’s API."),
        (500, "application/json", "null", "The server failed."),
    ],
)
def test_what_is_no_answer_of_this_api_is_said_to_be_none(visit: Visit, status: int, kind: str, body: str, advice: str) -> None:
    page = visit.ready().page
    page.route(CHAT, lambda route: route.fulfill(status=status, content_type=kind, body=body))
    visit.send(WHO)
    expect(page.get_by_role("alert")).to_contain_text(advice)
    page.route("**/v1/models", lambda route: route.fulfill(content_type="text/html", body="<p>Sign in</p>"))
    page.reload()
    expect(page.locator("#state")).to_have_attribute("title", re.compile("^What answers here is not this server’s API"))


def test_a_key_that_cannot_be_sent_is_said_to_be_the_fault(visit: Visit) -> None:
    page = visit.ready().page
    visit.setting("API key", "sk-\u200bpasted")
    expect(page.locator("#state")).to_have_text("API key needed")
    visit.send(WHO)
    expect(page.get_by_role("alert")).to_contain_text("This API key holds a character that cannot be sent")
    expect(page.get_by_role("button", name="Enter the key")).to_be_visible()


def test_settings_are_sent_kept_and_checked(visit: Visit) -> None:
    page = visit.ready().page
    given = {"Temperature": "0.5", "Top p": "0.9", "Top k": "40", "Min p": "0.01", "Max tokens": "4", "Seed": "7"}
    for name, value in given.items():
        visit.setting(name, value)
    visit.send(WHO)
    visit.finished()
    sent = visit.sent[0]
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "model")
    assert [sent[name] for name in names] == [0.5, 0.9, 40, 0.01, 4, 7, "concierge"]
    assert "repetition_penalty" not in sent
    expect(page.locator(".numbers")).to_contain_text("at max tokens")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Top k").input_value() == "40"
    visit.setting("Temperature", "3").send(WHO)
    assert page.locator(".turn").count() == 0
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert page.get_by_label("Message").input_value() == WHO
    visit.setting("API key", "mine")
    page.get_by_role("button", name="Reset").click()
    expect(page.get_by_label("Top k")).to_have_value("")
    expect(page.get_by_label("API key")).to_have_value("mine")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("API key").input_value() == "mine"
    visit.setting("API key", "")
    fine = {"Temperature": "0.333", "Top p": "0.955", "Top k": "-1", "Min p": "0.005", "Repetition penalty": "1.03"}
    for name, value in fine.items():
        visit.setting(name, value)
    visit.setting("Max tokens", "4").send(WHO)
    visit.finished()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert [visit.sent[1][name] for name in names] == [0.333, 0.955, -1, 0.005, 1.03]
    page.route(CHAT, lambda route: route.fulfill(status=500, json={"error": {"message": "no"}}), times=1)
    visit.send("once more")
    page.get_by_label("Message").fill("what is typed meanwhile")
    visit.setting("Temperature", "3")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert page.get_by_label("Message").input_value() == "what is typed meanwhile"
    expect(page.get_by_role("alert")).to_be_visible()
    visit.setting("Temperature", "1")
    page.get_by_label("Shade tokens by where they came from").uncheck()
    visit.send(WHO)
    visit.finished()
    assert page.locator(".token").first.evaluate("node => getComputedStyle(node).backgroundColor") == "rgba(0, 0, 0, 0)"


@pytest.mark.parametrize(
    "broken",
    [
        "sessionStorage.setItem('moaserve-playground', '{')",
        "Object.defineProperty(window, 'sessionStorage', { get() { throw new DOMException('denied', 'SecurityError'); } })",
    ],
    ids=["garbled", "blocked"],
)
def test_a_browser_that_keeps_nothing_chats_all_the_same(visit: Visit, broken: str) -> None:
    visit.page.add_init_script(broken)
    visit.ready().setting("Max tokens", "4").send(WHO)
    visit.finished()
    assert visit.sent[0]["max_tokens"] == 4
    assert visit.texts()[0]


def test_all_of_it_works_by_keyboard_alone(visit: Visit) -> None:
    page = visit.ready().page
    keys = page.keyboard
    expect(page.get_by_label("Message")).to_be_focused()
    keys.type("two")
    keys.press("Shift+Enter")
    keys.type("lines")
    keys.press("Enter")
    visit.finished()
    assert page.locator(".asked").inner_text() == "two\nlines"
    keys.press("Tab")
    expect(page.get_by_role("radio", name="On", exact=True)).to_be_focused()
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    expect(page.get_by_role("radio", name="Side by side")).to_be_checked()
    keys.press("Tab")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    keys.press("Shift+Tab")
    keys.press("Shift+Tab")
    keys.type(WHO)
    keys.press("Enter")
    visit.finished()
    assert page.locator(".turn").nth(1).locator(".answer").count() == 2
    expect(page.locator("#spoken")).to_contain_text("The texts are identical.")
    for name in ("Edit message", "Ask again", "Copy", "Copy", "Copy", "Settings", "New chat"):
        keys.press("Shift+Tab")
        expect(page.locator("button:focus")).to_have_text(name)
    keys.press("Tab")
    keys.press("Enter")
    keys.press("Tab")
    expect(page.get_by_label("API key")).to_be_focused()
    keys.press("Escape")
    expect(page.get_by_role("button", name="Settings")).to_be_focused()
    assert not page.get_by_label("API key").is_visible()
    keys.press("Shift+Tab")
    keys.press("Enter")
    assert page.locator(".turn").count() == 0
    expect(page.get_by_label("Message")).to_be_focused()
    unnamed = "nodes => nodes.filter(node => !node.labels?.length && !node.textContent.trim()).length"
    assert page.locator("button, input, select, textarea").evaluate_all(unnamed) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read(browser: Browser, server: Server, scheme: str) -> None:
    phone = {"width": 360, "height": 740}
    for visit in visiting(browser, server, viewport=phone, color_scheme=scheme, has_touch=True, reduced_motion="reduce"):
        page = visit.ready().page

        def fits(page: Page = page) -> None:
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.evaluate(UNREADABLE) == []

        fits()
        visit.setting("Temperature", "0").setting("Max tokens", "200")  # what is stopped early may lead to endless answers
        fits()
        page.get_by_role("button", name="Settings").click()
        visit.send("w" * 300 + LONG, "Side by side")
        expect(page.locator(".token").nth(20)).to_be_visible()
        moving = "nodes => nodes.filter(node => getComputedStyle(node, '::after').animationName !== 'none').length"
        assert page.locator(".text").evaluate_all(moving) == 0
        page.keyboard.press("Escape")
        visit.finished()
        visit.send(WHO, "Side by side")
        visit.finished()
        fits()
        page.route(CHAT, lambda route: route.fulfill(status=500, json={"error": {"message": "no", "code": "internal_error"}}))
        visit.send(WHO)
        expect(page.get_by_role("alert")).to_be_visible()
        fits()


def test_on_a_phone_no_keyboard_opens_over_an_answer(browser: Browser, server: Server) -> None:
    for visit in visiting(browser, server, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True):
        page = visit.ready().page
        page.locator("#examples button").first.tap()
        visit.finished()
        page.get_by_role("button", name="Ask again").tap()
        visit.finished()
        expect(page.get_by_role("textbox", name="Message")).not_to_be_focused()
        expect(page.get_by_role("button", name="Send")).to_be_focused()


@pytest.mark.parametrize("clipboard", [True, False], ids=["https", "http"])
def test_an_answer_is_copied_without_its_thoughts(visit: Visit, clipboard: bool) -> None:
    page = visit.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    if not clipboard:  # what browsers have for a page that came by plain HTTP from another machine
        page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    visit.ready()
    page.evaluate(ANSWERED_HERE)
    visit.send(WHO)
    thought = _chunk((0, "Hm"))
    said = _chunk((1, "Two\n"), (2, "\nlines 🙂"))
    page.evaluate(TELL, thought.replace('"content"', '"reasoning_content"') + said + _stream().partition("\n\n")[2])
    visit.finished()
    copy = page.locator(".answer footer button")
    copy.click()
    expect(page.locator("#spoken")).to_have_text("Copied.")
    expect(copy).to_be_focused()
    page.get_by_label("Message").press("Control+v")
    assert page.get_by_label("Message").input_value() == "Two\n\nlines 🙂"


def test_the_last_turn_is_asked_again_or_its_message_edited(visit: Visit) -> None:
    page = visit.ready().page
    answers = iter(("first", "second", "third", "fourth"))
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=_stream(next(answers))))
    message, edit = page.get_by_label("Message", exact=True), page.get_by_role("button", name="Edit message")
    for asked in ("one", "two"):
        visit.send(asked)
        visit.finished()
    page.get_by_role("button", name="Ask again").click()  # the last turn alone has one
    expect(page.locator(".text").last).to_have_text("third")
    visit.finished()
    assert visit.texts() == ["first", "third"]
    told = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "first"}]
    assert visit.sent[2]["messages"] == visit.sent[1]["messages"] == [*told, {"role": "user", "content": "two"}]
    message.fill("a draft")
    for cancel in (lambda: page.keyboard.press("Escape"), lambda: page.get_by_role("button", name="Cancel").click()):
        edit.click()
        expect(message).to_be_focused()
        assert message.input_value() == "two"
        cancel()
        expect(message).to_be_focused()
        assert message.input_value() == "a draft"
    assert visit.texts() == ["first", "third"]
    edit.click()
    message.fill("three")
    message.press("Enter")
    expect(page.locator(".text").last).to_have_text("fourth")
    visit.finished()
    assert page.locator(".asked").all_inner_texts() == ["one", "three"]
    assert visit.sent[3]["messages"] == [*told, {"role": "user", "content": "three"}]
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    assert message.input_value() == "a draft"
    edit.click()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    assert message.input_value() == "a draft"
    page.route(CHAT, lambda route: route.fulfill(status=400, json={"error": {"message": "no", "code": "context_length_exceeded"}}))
    visit.send("too long")
    page.get_by_role("alert").get_by_role("button", name="Edit message").click()
    assert message.input_value() == "too long"
    assert [refusal for refusal in visit.refusals if "400" not in refusal] == []


def test_lines_run_in_the_direction_of_their_own_script(visit: Visit) -> None:
    page = visit.ready().page
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=_stream("שלום", "!", "\nHello", "!")))
    visit.send("שלום!")
    visit.finished()
    places = [box["x"] for box in map(lambda token: token.bounding_box() or {}, page.locator(".text .token").all())]
    assert places[0] > places[1] and places[2] < places[3]
    for typed in page.locator("textarea, .asked").all():
        assert typed.evaluate("node => getComputedStyle(node).unicodeBidi") == "plaintext"


def test_an_enter_that_ends_a_composition_sends_nothing(visit: Visit) -> None:
    page = visit.ready().page
    page.get_by_label("Message").fill("にほん")
    enter = {"key": "Enter", "keyCode": 229, "bubbles": True, "cancelable": True}  # after the composition's end, as in Safari
    page.get_by_label("Message").dispatch_event("keydown", enter)
    assert page.locator(".turn").count() == 0
    assert page.get_by_label("Message").input_value() == "にほん"


def test_a_screen_reader_finds_headings_in_order_and_forced_colours_tell_drafts(visit: Visit) -> None:
    page = visit.ready().page
    headings = "nodes => nodes.filter(node => node.checkVisibility()).map(node => Number(node.localName[1]))"
    levels = [page.locator("h1, h2, h3").evaluate_all(headings)]
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=_stream("Two", " lines")))
    visit.send(WHO)
    visit.finished()
    levels.append(page.locator("h1, h2, h3").evaluate_all(headings))
    assert levels == [[1, 2], [1, 2]]
    page.emulate_media(forced_colors="active")
    lines = "nodes => nodes.map(node => getComputedStyle(node).textDecorationLine)"
    assert page.locator(".text .token").evaluate_all(lines) == ["underline", "none"]


def test_an_answer_of_one_token_has_no_speed(visit: Visit) -> None:
    page = visit.ready().page
    visit.setting("Max tokens", "1").send(WHO)
    visit.finished()
    expect(page.locator(".numbers")).to_contain_text("at max tokens")
    assert page.locator(".speed").inner_text() == ""


def test_at_four_hundred_percent_there_is_room_to_read(browser: Browser, server: Server) -> None:
    for visit in visiting(browser, server, viewport={"width": 320, "height": 256}):
        page = visit.ready().page
        page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=_stream("Two", " lines")))
        visit.send(WHO)
        visit.finished()
        covered = """node => {
          node.scrollIntoView({ block: "center" });
          const { top, bottom, left, right } = node.getBoundingClientRect();
          return !node.contains(document.elementFromPoint((left + right) / 2, (top + bottom) / 2));
        }"""
        assert not page.locator(".text").evaluate(covered)


def test_without_javascript_it_says_what_it_needs(browser: Browser, server: Server) -> None:
    for visit in visiting(browser, server, java_script_enabled=False):
        page = visit.opened().page
        expect(page.locator(".noscript")).to_be_in_viewport()
        assert page.get_by_role("button").count() == 0


def test_on_a_phone_the_settings_come_into_view_and_leave_the_answer_where_it_was(browser: Browser, server: Server) -> None:
    for visit in visiting(browser, server, viewport={"width": 360, "height": 740}):
        page = visit.ready().page
        page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=_stream("Two", " lines")))
        for _ in range(4):
            visit.send(WHO)
            visit.finished()
        toggle, first, last = page.get_by_role("button", name="Settings"), page.get_by_label("API key"), page.locator(".plot").last
        toggle.click()
        expect(first).to_be_in_viewport()
        last.scroll_into_view_if_needed()
        expect(first).not_to_be_in_viewport()
        toggle.click()  # they are open, but not seen
        expect(first).to_be_in_viewport()
        toggle.click()
        expect(first).to_be_hidden()
        expect(last).to_be_in_viewport()


def test_it_works_under_a_path_that_a_proxy_strips(visit: Visit, server: Server) -> None:
    page = visit.page
    page.route("**/llm/**", lambda route: route.fulfill(response=route.fetch(url=route.request.url.replace("/llm/", "/"))))
    visit.base += "/llm"
    visit.ready().send(WHO)
    visit.finished()
    assert visit.texts()[0]
    assert all(url.startswith(f"{server.root_url}/llm/") for url in visit.asked)


def test_events_are_read_however_the_network_cuts_them(visit: Visit) -> None:
    events = 'data: {"a": "漢🙂"}\n\n: ping\n\ndata:b\r\n\r\nevent: x\ndata: c\ndata: d\n\n'.encode()
    read = """async ([url, bytes, size]) => {
      const { eventData } = await import(url);
      const body = new ReadableStream({ start(controller) {
        for (let at = 0; at < bytes.length; at += size) controller.enqueue(new Uint8Array(bytes.slice(at, at + size)));
        controller.close();
      } });
      const found = [];
      for await (const data of eventData(body)) found.push(data);
      return found;
    }"""
    page = visit.ready().page
    for size in (1, 2, 3, 5, 1000):
        found = page.evaluate(read, [f"{visit.base}/playground/sse.js", list(events), size])
        assert found == ['{"a": "漢🙂"}', "b", "c\nd"]


def test_asking_for_origins_changes_no_token(server: Server) -> None:
    for extra in ({"temperature": 0}, {"seed": 11}, {"seed": 11, "speculative": False}, {"max_tokens": 1}):
        body = {"messages": [{"role": "user", "content": WHO}], "max_tokens": 60, "seed": 5, **extra}
        plain, told = (
            httpx.post(f"{server.base_url}/chat/completions", json=body | asked, timeout=60).json()
            for asked in ({}, {"return_token_origins": True})
        )
        origins = told["choices"][0].pop("token_origins")
        assert told["choices"] == plain["choices"] and told["usage"] == plain["usage"]
        made = told["metrics"]["speculative_decoding"]
        assert sum(token["origin"] == "draft" for token in origins) == made["num_accepted_draft_tokens"]
        assert len(origins) == told["usage"]["completion_tokens"]
    scored = {"prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 0, "return_token_origins": True}
    assert httpx.post(f"{server.base_url}/completions", json=scored, timeout=60).json()["choices"][0]["token_origins"] == []
