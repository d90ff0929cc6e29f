"""The page at `/` in a browser: by keyboard, in both colour schemes, on a telephone, and with
nothing in the console."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.page.browser import Browser
from tests.page.conftest import CUT_OFF, needs_chromium
from tests.page.toy import ToyServer, serving

pytestmark = pytest.mark.full

CHART = "document.querySelectorAll('#charts path')[{}].getAttribute('d').length"
LABELLED = """[...document.querySelectorAll('input, textarea')].every((field) => field.labels.length === 1)
  && [...document.querySelectorAll('svg')].every((chart) => chart.getAttribute('aria-label'))"""
SMALL_TARGETS = (
    "[...document.querySelectorAll('button, input, textarea')].filter((e) => "
    "e.getBoundingClientRect().height < 24).length"
)


@pytest.fixture(scope="module")
def toy() -> Iterator[ToyServer]:
    with serving(ToyServer(chat=True)) as toy:
        yield toy


def opened(
    browser: Browser, toy: ToyServer, *, width: int = 1100, scheme: str = "light"
) -> Browser:
    browser.open(toy.url, width=width, scheme=scheme)
    browser.wait_for("document.querySelector('#state')?.textContent === 'up'")
    return browser


def ask_by_keyboard(browser: Browser, prompt: str) -> None:
    browser.evaluate("document.activeElement.blur()")
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.id") == "prompt"
    browser.type(prompt)
    browser.press("Enter", ctrl=True)


def answered(browser: Browser) -> str:
    browser.wait_for("document.querySelector('#outcome').textContent.includes('ended by')")
    return str(browser.evaluate("document.querySelector('#answer').textContent"))


@needs_chromium
def test_a_prompt_typed_and_sent_by_keyboard_is_answered_as_it_streams(
    browser: Browser, toy: ToyServer
) -> None:
    ask_by_keyboard(opened(browser, toy), "Wilt thou be gone?")
    browser.wait_for("document.querySelector('#answer').textContent.startsWith('It was the')")
    assert browser.evaluate("document.querySelector('#answer').getAttribute('aria-busy')") == "true"
    assert answered(browser).startswith("It was the nightingale, and not the lark.")
    assert browser.evaluate("document.querySelector('#outcome').textContent").startswith(
        "200 tokens, the first after"
    )
    assert toy.asked[-1]["messages"] == [{"role": "user", "content": "Wilt thou be gone?"}]
    assert browser.errors == []


@needs_chromium
def test_escape_stops_an_answer_and_notifies_the_server(browser: Browser, toy: ToyServer) -> None:
    ended = toy.metrics.finished["abort"]
    ask_by_keyboard(opened(browser, toy), "Go on")
    browser.wait_for("document.querySelector('#answer').textContent.length > 3")
    browser.press("Escape")
    browser.wait_for("document.querySelector('#outcome').textContent === 'stopped'")
    browser.wait_for(
        f"fetch('page/live').then((a) => a.json()).then((live) => live.finished.abort > {ended})"
    )
    assert browser.errors == []


@needs_chromium
def test_every_control_is_reached_by_tab_in_the_order_of_the_page(
    browser: Browser, toy: ToyServer
) -> None:
    opened(browser, toy)
    reached = []
    for _ in range(5):
        browser.press("Tab")
        reached.append(browser.evaluate("document.activeElement.id"))
    assert reached == ["prompt", "max-tokens", "temperature", "key", "send"]


@needs_chromium
def test_every_field_and_chart_has_a_name_for_a_screen_reader(
    browser: Browser, toy: ToyServer
) -> None:
    opened(browser, toy)
    assert browser.evaluate(LABELLED)
    names = [
        node["name"]["value"]
        for node in browser.command("Accessibility.getFullAXTree")["nodes"]
        if node.get("role", {}).get("value") == "image"
    ]
    assert any(name.startswith("Requests: running 0, waiting 0") for name in names)


@needs_chromium
def test_charts_and_counts_follow_the_engine(browser: Browser, toy: ToyServer) -> None:
    ask_by_keyboard(opened(browser, toy), "Wilt thou be gone?")
    for path in range(8):
        browser.wait_for(f"{CHART.format(path)} > 10")
    assert "dovetail-llm:fcfs" in browser.evaluate("document.querySelector('#parts').textContent")
    assert browser.evaluate("document.querySelector('#model').textContent") == "a-model"


@needs_chromium
def test_pages_are_shown_by_cache_group(browser: Browser, toy: ToyServer) -> None:
    ask_by_keyboard(opened(browser, toy), "Wilt thou be gone?")
    browser.wait_for(
        "document.querySelector('#counts').textContent.includes('KV cache held: window 1281.0 %')"
    )
    assert "KV cache held: full6.0 %" in browser.evaluate(
        "document.querySelector('#counts').textContent"
    )


@needs_chromium
def test_the_success_of_drafts_is_shown(browser: Browser, toy: ToyServer) -> None:
    ask_by_keyboard(opened(browser, toy), "Wilt thou be gone?")
    browser.wait_for(
        "document.querySelector('#counts').textContent.includes('acceptance length2.50')"
    )
    counts = browser.evaluate("document.querySelector('#counts').textContent")
    assert "drafts accepted60 %" in counts
    assert "accepted by position75 %, 50 %, 25 %" in counts


@needs_chromium
def test_the_schedulers_last_steps_are_shown_the_latest_first(
    browser: Browser, toy: ToyServer
) -> None:
    ask_by_keyboard(opened(browser, toy), "Wilt thou be gone?")
    browser.wait_for("document.querySelectorAll('#steps tbody tr').length >= 2")
    first, second = (
        browser.evaluate(
            f"document.querySelectorAll('#steps tbody tr')[{row}].cells[0].textContent"
        )
        for row in (0, 1)
    )
    assert int(first) == int(second) + 1
    assert (
        browser.evaluate("document.querySelector('#scheduler').textContent") == "dovetail-llm:fcfs"
    )
    assert browser.evaluate(
        "[...document.querySelectorAll('#steps tr')].every((row) => row.cells.length === 8)"
    )
    assert browser.errors == []


@needs_chromium
@pytest.mark.parametrize("width", [360, 390, 1100])
def test_both_colour_schemes_are_drawn_and_nothing_sticks_out_at_the_side(
    browser: Browser, toy: ToyServer, tmp_path: Path, width: int
) -> None:
    folder = Path(os.environ.get("DOVETAIL_SCREENSHOTS", tmp_path))
    brightness = {}
    for scheme in ("light", "dark"):
        ask_by_keyboard(
            opened(browser, toy, width=width, scheme=scheme),
            "Wilt thou be gone? it is not yet near day.",
        )
        answered(browser)
        browser.wait_for(f"{CHART.format(7)} > 60")
        assert browser.evaluate(CUT_OFF) == []
        assert browser.evaluate(SMALL_TARGETS) == 0
        picture = np.asarray(
            Image.open(browser.screenshot(folder / f"page-{scheme}-{width}.png")).convert("RGB")
        )
        assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 50, "the page is blank"
        brightness[scheme] = picture.mean()
    assert brightness["dark"] < 80 < 200 < brightness["light"]
    assert browser.errors == []


@needs_chromium
def test_a_model_without_a_chat_template_continues_from_a_text(browser: Browser) -> None:
    with serving(ToyServer(chat=False)) as toy:
        ask_by_keyboard(opened(browser, toy), "ROMEO:")
        assert answered(browser).startswith("It was")
        assert (toy.asked[-1]["path"], toy.asked[-1]["prompt"]) == ("/v1/completions", "ROMEO:")
        assert (
            browser.evaluate("document.querySelector('#prompt-label').textContent")
            == "Text to go on from"
        )


@needs_chromium
def test_a_key_is_sent_with_requests_and_kept_nowhere(browser: Browser) -> None:
    with serving(ToyServer(chat=True, key="a-secret")) as toy:
        ask_by_keyboard(opened(browser, toy), "Hello")
        browser.wait_for(
            "document.querySelector('#outcome').textContent.includes('asks for an API key')"
        )
        browser.evaluate("document.querySelector('#key').focus()")
        browser.type("a-secret")
        browser.evaluate("document.querySelector('#prompt').focus()")
        browser.press("Enter", ctrl=True)
        assert answered(browser).startswith("It was")
        assert (
            browser.evaluate(
                "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, "
                "location.href])"
            ).count("a-secret")
            == 0
        )


@needs_chromium
def test_a_server_that_goes_away_is_reported(browser: Browser) -> None:
    with serving(ToyServer(chat=True)) as toy:
        opened(browser, toy)
    browser.wait_for(
        "document.querySelector('#state').textContent === \"the server doesn't answer\""
    )


def test_the_page_takes_nothing_from_elsewhere_and_may_not_be_framed(toy: ToyServer) -> None:
    for path in ("", "page/page.css", "page/page.js", "page/icon.svg"):
        answer = httpx.get(toy.url + path)
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert set(re.findall(r"\w+://[^\s\"]+", answer.text)) <= {
            "http://www.w3.org/2000/svg"
        }  # a name, not an address
