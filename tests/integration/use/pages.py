"""What the tests of the web page do and measure on a page."""

from __future__ import annotations

from playwright.sync_api import Page, expect
from tests.integration.use.conftest import KEY


def open_user(page: Page, user: str) -> None:
    page.goto("/inferscale/ui")
    page.get_by_label("User", exact=True).fill(user)
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("status")).to_contain_text(f"Memory of {user}")


def contrast(page: Page, selector: str) -> float:
    """WCAG's contrast of a text and what is behind it."""
    ratio = page.evaluate(
        """(selector) => {
          const parse = (color) => color.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
            .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
          const shown = document.querySelector(selector);
          let behind = shown;
          const ground = () => getComputedStyle(behind).backgroundColor;
          while (parse(ground())[3] === 0) behind = behind.parentElement;
          const values = [getComputedStyle(shown).color, ground()]
            .map((color) => light(parse(color))).sort((a, b) => b - a);
          return (values[0] + 0.05) / (values[1] + 0.05);
        }""",
        selector,
    )
    return float(ratio)
