"""What people use, over one server (a file of tests is one process, which starts its own).

Chats in sessions over the real engine, the examples as their readers run them, and the web page in
a real browser.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.integration.kube.control_plane import ROOT
from tests.integration.served import Served
from tests.integration.use.chats import Chat, cached, tokens
from tests.integration.use.chromium import find_chromium
from tests.integration.use.conftest import BLOCK, KEY, NUM_FACTS
from tests.integration.use.pages import contrast, open_user

pytestmark = pytest.mark.vllm

FACTS = "/inferscale/v1/users/{}/facts"
QUESTIONS = ("What is my dog called?", "Where do I work?", "Do I sing?", "Who is my brother?")
EXAMPLES = ROOT / "examples"
MARKUP = "<img src=x onerror=alert(1)><b>bold</b> & \"quoted\" 'text'"
MARGIN_MS = 60_000
expect.set_options(timeout=MARGIN_MS)


def test_a_chat_is_exact_and_its_history_is_cached(served: Served) -> None:
    injected = Chat(served.client, "maya", "one", "injected")
    text = Chat(served.client, "maya", "two", "text")
    before = None
    for number, question in enumerate(QUESTIONS):
        if number == 2:
            write = {"text": "Maya sings in a choir on Tuesdays."}
            served.client.put(f"{FACTS.format('maya')}/sings", json=write).raise_for_status()
        pair = injected.say(question), text.say(question)
        assert tokens(pair[0]) == tokens(pair[1])
        usage = [answer["usage"] for answer in pair]
        assert usage[0]["prompt_tokens"] == usage[1]["prompt_tokens"]
        memory = usage[0]["memory"]
        assert memory["mode"] == "injected"
        assert memory["session"] == ("continued" if number else "started")
        assert memory["new_facts"] == (1 if number == 2 else 0)
        assert memory["facts"] == NUM_FACTS + (1 if number >= 2 else 0)
        if before is not None:
            # Whole blocks of the prompt before, injected or not; of text the same.
            history = before["usage"]["prompt_tokens"] // BLOCK * BLOCK
            assert all(cached(answer) >= history for answer in pair)
        before = pair[0]


def test_without_a_session_the_history_is_computed_again(served: Served) -> None:
    """Shows that the test above can fail: a fact more at the front, and the history is lost."""
    chat = Chat(served.client, "noah", None, "text")
    chat.memory |= {"k": 5, "order": "relevance"}
    answers = [chat.say(question) for question in QUESTIONS[:3]]
    assert cached(answers[2]) < answers[1]["usage"]["prompt_tokens"] // BLOCK * BLOCK


def test_a_deleted_fact_ends_the_session(served: Served) -> None:
    chat = Chat(served.client, "zoe", "one", "injected")
    chat.say(QUESTIONS[0])
    facts = served.client.get(FACTS.format("zoe")).json()["facts"]
    served.client.delete(f"{FACTS.format('zoe')}/{facts[-1]['id']}").raise_for_status()
    answer = chat.say(QUESTIONS[1])
    assert answer["usage"]["memory"]["session"] == "restarted"
    assert answer["usage"]["memory"]["facts"] == NUM_FACTS - 1


def run(script: str, *arguments: str, key: str = KEY, text: str = "") -> Any:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"INFERSCALE_API_KEY": key},
    )


def url(served: Served) -> str:
    return str(served.client.base_url).rstrip("/")


def test_openai_client(served: Served) -> None:
    lines = ["/remember My owl is called Hedwig.", "/facts", "What is my owl called?", "And why?"]
    arguments = ["openai-client/chat.py", "--url", url(served), "--user", "openai user/é"]
    arguments += ["--max-tokens", "5"]
    done = run(*arguments, text="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (name,) = re.findall(r"remembered as (\S+)", done.stdout)
    assert f"{name}: My owl is called Hedwig." in done.stdout
    assert done.stdout.count("[memory text: 1 facts, 0 tokens injected]") == 2
    gone = run(*arguments, text=f"/forget {name}\n/facts\nWhat is my owl called?\n/nonsense")
    assert gone.returncode == 0, gone.stderr
    assert "forgotten" in gone.stdout
    assert "Hedwig" not in gone.stdout
    assert "[memory none: 0 facts" in gone.stdout


def test_langchain(served: Served) -> None:
    arguments = ["langchain/chat.py", "--url", url(served), "--user", "chain", "--max-tokens", "5"]
    arguments += ["--remember", "My owl is called Hedwig.", "--remember", "I live in Bergen."]
    done = run(*arguments, "What is my owl called?", "And why?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nearest facts:\n- My owl is called Hedwig.\n- I live in Bergen.")
    assert done.stdout.count("[memory: text]") == 2


def test_load(served: Served) -> None:
    arguments = ["load-test/load_test.py", "--url", url(served), "--users", "1,4", "--k", "5,10"]
    arguments += ["--requests", "2", "--max-tokens", "3"]
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    heading, *rows = (line.split() for line in done.stdout.splitlines())
    assert heading[:4] == ["k", "users", "mode", "requests"]
    assert [row[:6] for row in rows] == [
        [k, users, mode, str(2 * int(users)), "0", "0"]
        for k in ("5", "10")
        for users in ("1", "4")
        for mode in ("text", "injected")
    ]
    assert all(float(row[6]) <= float(row[7]) <= float(row[8]) for row in rows)


def test_load_hides_no_failure(served: Served) -> None:
    """Too many tokens for the model: every request is refused."""
    arguments = ["load-test/load_test.py", "--url", url(served), "--users", "2", "--k", "5"]
    done = run(*arguments, "--requests", "1", "--max-tokens", "100000", "--no-warm-up")
    assert done.returncode == 1
    assert "errors: 4 x HTTP 400" in done.stdout
    assert [row.split()[3:7] for row in done.stdout.splitlines()[1:3]] == [["2", "2", "0", "-"]] * 2


def test_load_prepares_and_cleans_up(served: Served) -> None:
    arguments = ["load-test/load_test.py", "--url", url(served), "--prefix", "tmp-", "--users", "2"]
    done = run(*arguments, "--prepare", "6", "--k", "5", "--modes", "injected", "--requests", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    # Written a moment ago and not encoded yet: said, not hidden.
    assert done.stdout.splitlines()[1].split()[:6] == ["5", "2", "injected", "2", "0", "2"]
    page = served.client.get("/inferscale/v1/users/tmp-001/facts").json()
    assert len(page["facts"]) == 6
    assert run(*arguments, "--clean").returncode == 0
    assert served.client.get("/inferscale/v1/users/tmp-001/facts").status_code == 404


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = find_chromium()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=str(chromium.path),
            args=["--no-sandbox"],  # the account that runs the tests may be root
            env={**os.environ, **chromium.environment},
        )
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """An empty tab; what the page itself gets wrong fails the test."""
    context = browser.new_context(base_url=str(served.client.base_url), accept_downloads=True)
    context.set_default_timeout(MARGIN_MS)
    tab = context.new_page()
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on(
        "console",
        lambda line: wrong.append(line.text) if "Content Security Policy" in line.text else None,
    )
    tab.on("dialog", lambda dialog: wrong.append(dialog.message))
    yield tab
    context.close()
    assert wrong == []


def facts_of(client: httpx.Client, user: str) -> list[dict[str, Any]]:
    answer = client.get(f"/inferscale/v1/users/{user}/facts", params={"limit": 1000})
    return [] if answer.status_code == 404 else answer.json()["facts"]


def test_a_wrong_key_is_named_and_a_right_one_stays_in_the_tab(page: Page) -> None:
    page.goto("/inferscale/ui")
    page.get_by_label("User", exact=True).fill("maya")
    page.get_by_label("Key", exact=True).fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_contain_text("The key was not accepted")
    expect(page.get_by_role("heading", name="Facts")).to_be_hidden()
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Facts")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    page.reload()
    expect(page.get_by_role("status")).to_contain_text("Memory of maya")
    stored = page.evaluate("[localStorage.length, document.cookie, location.href]")
    assert stored[:2] == [0, ""]
    assert KEY not in stored[2]
    page.get_by_role("button", name="Close").click()
    assert page.evaluate("sessionStorage.length") == 0
    expect(page.get_by_role("heading", name="Facts")).to_be_hidden()


def test_write_correct_forget(page: Page, served: Served) -> None:
    open_user(page, "page-writer")
    expect(page.get_by_text("No facts yet.")).to_be_visible()
    page.get_by_label("New fact").fill(MARKUP)
    page.keyboard.press("Enter")
    row = page.get_by_role("row").filter(has_text="quoted")
    expect(row).to_be_visible()
    assert row.get_by_role("cell").first.inner_text() == MARKUP
    assert page.locator("td b, td img").count() == 0
    page.get_by_label("New fact").fill("Page has a parrot.")
    page.keyboard.press("Enter")
    parrot = page.get_by_role("row").filter(has_text="parrot")
    parrot.get_by_role("button", name="Correct").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Fact").fill("Page has an owl.")
    dialog.get_by_role("button", name="Save").click()
    owl = page.get_by_role("row").filter(has_text="owl")
    expect(owl).to_be_visible()
    texts = [fact["text"] for fact in facts_of(served.client, "page-writer")]
    assert texts == [MARKUP, "Page has an owl."]
    # A person who thinks again, by the keyboard.
    owl.get_by_role("button", name="Forget").focus()
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert len(facts_of(served.client, "page-writer")) == 2
    owl.get_by_role("button", name="Forget").click()
    dialog.get_by_role("button", name="Forget").click()
    expect(owl).to_have_count(0)
    assert [fact["text"] for fact in facts_of(served.client, "page-writer")] == [MARKUP]


def test_a_change_by_somebody_else_is_not_overwritten(page: Page, served: Served) -> None:
    url = "/inferscale/v1/users/page-shared/facts/cat"
    served.client.put(url, json={"text": "The cat is black."}).raise_for_status()
    open_user(page, "page-shared")
    page.get_by_role("button", name="Correct").click()
    served.client.put(url, json={"text": "The cat is white."}).raise_for_status()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Fact").fill("The cat is grey.")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("changed by somebody else")
    expect(page.get_by_role("row").filter(has_text="white")).to_be_visible()
    assert served.client.get(url).json()["text"] == "The cat is white."


def test_pages_and_search(page: Page, served: Served) -> None:
    facts = [{"id": f"n{n}", "text": f"Number {n} is a whole number."} for n in range(25)]
    facts[7]["text"] = "The sailing boat lies in the harbour."
    url = "/inferscale/v1/users/page-reader/facts"
    served.client.put(url, json={"facts": facts}).raise_for_status()
    open_user(page, "page-reader")
    rows = page.locator("#facts tr")
    expect(rows).to_have_count(20)
    expect(page.get_by_role("button", name="Previous")).to_be_disabled()
    page.get_by_role("button", name="Next").click()
    expect(rows).to_have_count(5)
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    page.get_by_role("button", name="Previous").click()
    expect(rows).to_have_count(20)
    page.get_by_label("Search by meaning").fill("Where is the ship?")
    page.keyboard.press("Enter")
    expect(page.get_by_text("facts, nearest first")).to_be_visible()
    expect(rows.first).to_contain_text("sailing boat")
    page.get_by_role("button", name="Show all").click()
    expect(rows).to_have_count(20)


def test_a_chat_says_what_was_injected(page: Page, served: Served) -> None:
    open_user(page, "noah")
    served.client.get("/inferscale/v1/users/noah/answers").raise_for_status()
    page.locator("#facts-number").fill("7")
    page.get_by_label("Longest answer").fill("5")
    for number, state in enumerate(("started", "continued")):
        page.get_by_label("Message").fill("What is my dog called?")
        page.keyboard.press("Enter")
        used = page.locator("#log .used").nth(number)
        expect(used).to_contain_text(f"session {state}")
        expect(used).to_contain_text("memory injected")
        expect(used).to_contain_text("first token after")
    lines = page.locator("#answers tr")
    expect(lines.nth(1)).to_be_visible()
    expect(lines.first).to_contain_text("memory injected")
    expect(lines.first).to_contain_text(" s")
    lines.first.locator("summary").press("Enter")
    shown = lines.first.locator("li")
    expect(shown).to_have_count(7)
    known = {fact["text"] for fact in facts_of(served.client, "noah")}
    assert set(shown.all_inner_texts()) <= known
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#log li")).to_have_count(0)


def test_export_and_delete(page: Page, served: Served, tmp_path: Path) -> None:
    open_user(page, "page-leaver")
    page.get_by_label("New fact").fill("I move to Lisbon.")
    page.keyboard.press("Enter")
    expect(page.get_by_role("row").filter(has_text="Lisbon")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "memory.jsonl")
    (line,) = [json.loads(text) for text in (tmp_path / "memory.jsonl").read_text().splitlines()]
    assert (line["kind"], line["text"]) == ("fact", "I move to Lisbon.")
    page.get_by_role("button", name="Delete this user").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Delete")).to_be_disabled()
    dialog.get_by_label("to confirm").fill("page-leave")
    expect(dialog.get_by_role("button", name="Delete")).to_be_disabled()
    dialog.get_by_label("to confirm").fill("page-leaver")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_contain_text("Deleted:")
    assert "Lisbon" not in page.content()
    assert facts_of(served.client, "page-leaver") == []


def test_every_control_has_a_name_and_both_themes_have_contrast(page: Page) -> None:
    open_user(page, "maya")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button")].filter((field) =>
          !field.closest("dialog") && !field.labels?.length && !field.ariaLabel
          && !field.textContent.trim()).map((field) => field.id)"""
    )
    assert nameless == []
    assert page.locator("#facts tr").count() <= NUM_FACTS
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for selector in ("body", ".quiet", "button[type=submit]", "button.danger"):
            assert contrast(page, selector) >= 4.5, (scheme, selector)
