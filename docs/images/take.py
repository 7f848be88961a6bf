"""Take the pictures of docs/playground.md from a running server: `python docs/images/take.py http://127.0.0.1:8000`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

FOLDER = Path(__file__).parent
PICTURES = {
    "playground-light.png": {"color_scheme": "light", "viewport": {"width": 1200, "height": 810}},
    "playground-dark.png": {"color_scheme": "dark", "viewport": {"width": 1200, "height": 810}},
    "playground-phone.png": {"color_scheme": "light", "viewport": {"width": 390, "height": 1120}},
}


def take(browser: Browser, url: str, name: str) -> None:
    """One picture: a finished side-by-side run, greedy so that it says the same each time."""
    context = browser.new_context(**PICTURES[name])
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#state")).to_have_text("Ready", timeout=60_000)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("radio", name="Side by side").check()
    page.get_by_label("Message").fill("Hi, who are you?")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".verdict")).to_be_visible(timeout=120_000)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.screenshot(path=FOLDER / name)
    context.close()


def main() -> None:
    """All pictures."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        for name in PICTURES:
            take(browser, sys.argv[1], name)
        browser.close()


if __name__ == "__main__":
    main()
