"""A page opened in a real browser, without a network: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


@dataclass
class Opened:
    """An opened page, and what it did that it must not do."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def cells(self, selector: str) -> list[list[str]]:
        """The texts of a table's body, row by row."""
        script = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        return list(self.page.locator(f"{selector} tbody tr").evaluate_all(script))

    def hovered(self) -> str:
        """What is said of the point under the mouse."""
        tip = self.page.locator(".bk-tooltip-content", has_text="shape")
        tip.wait_for()
        return str(tip.text_content())

    def place_of(self, index: int) -> tuple[float, float]:
        """Where on the screen the roofline's dot of a drawn point is."""
        script = """index => {
          const view = [...Bokeh.index.roots].find((v) => v.model.name === "roofline");
          view.el.scrollIntoView({ block: "center" });
          const { data } = Bokeh.documents.map((d) => d.get_model_by_name("shown")).find(Boolean);
          const { x, y } = view.el.getBoundingClientRect();
          const { x_scale, y_scale } = view.frame;
          return [x + x_scale.compute(data.x[index]), y + y_scale.compute(data.y[index])];
        }"""
        x, y = self.page.evaluate(script, index)
        return x, y


def need_browser() -> None:
    """Skip where there is none, or nothing that drives it."""
    pytest.importorskip("bokeh", reason="needs the extra `page`")
    pytest.importorskip("playwright", reason="needs the extra `browser`")
    if not CHROMIUM:
        pytest.skip("needs Debian's package chromium")


@contextmanager
def opened(path: Path, scheme: str = "light") -> Iterator[Opened]:
    """A page that has drawn itself; ends with what it complained about, which must be nothing."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(
            offline=True, color_scheme=scheme, viewport={"width": 1200, "height": 900},
            permissions=["clipboard-read", "clipboard-write"],
        )  # fmt: skip
        here = Opened(context.new_page())
        here.page.on("console", lambda message: _complain(here, message))
        here.page.on("pageerror", lambda error: here.complaints.append(str(error)))
        here.page.on("request", lambda request: _only_itself(here, request.url, path))
        here.page.on("dialog", lambda dialog: here.complaints.append(f"dialog {dialog.message}"))
        here.page.goto(path.as_uri())
        here.page.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
        yield here
        browser.close()
    assert not here.complaints, here.complaints


def _complain(here: Opened, message: Any) -> None:
    if message.type in ("error", "warning"):
        here.complaints.append(message.text)


def _only_itself(here: Opened, url: str, path: Path) -> None:
    if url != path.as_uri() and not url.startswith(("data:", "blob:")):
        here.complaints.append(f"asked for {url}")
