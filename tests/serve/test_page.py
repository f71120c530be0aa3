"""The page at `/`: offline, one script, and a chat that a browser really holds."""

import asyncio
import base64
import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed (extra: serve)")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra: serve)")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

import uvicorn
from serve.asgi import ask

from trt_kvcache import DecodeSession
from trt_kvcache.serve.server import bind
from trt_kvcache.serve.service import Service

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_the_page_runs_its_own_script_alone_and_names_nobody_else(rows: DecodeSession) -> None:
    service = Service(rows, "tiny", ["secret"])
    try:
        reply = asyncio.run(ask(service.app, "/"))
    finally:
        service.core.close()
    page = reply.body.decode()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in reply.headers["content-security-policy"]
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.findall(r"https?:|src=|@import|innerHTML|eval\(", page)


@contextmanager
def served(service: Service) -> Iterator[str]:
    with bind("127.0.0.1", 0) as sock:
        server = uvicorn.Server(uvicorn.Config(service.app, log_level="error", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
        finally:
            service.core.close()
            server.should_exit = True
            thread.join()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


MARKDOWN = """# Title
Plain **bold** and *slanted* `a * b` 2 * 3 * 4 <b>tag</b>

- one
2. **two**

```python
if x:
    *y* = "<i>"
```
end
"""
SHOWN = [
    ("div", "heading", "Title"),
    ("p", "", "Plain bold and slanted a * b 2 * 3 * 4 <b>tag</b>"),
    ("div", "item", "• one"),
    ("div", "item", "2. two"),
    ("pre", "", 'if x:\n    *y* = "<i>"'),
    ("p", "", "end"),
]


@pytest.mark.slow  # a browser takes seconds to start
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_answers_are_markdown_and_settings_are_sent(rows: DecodeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code, emphasis, lists and headings; temperature and system message; the model's own settings are shown."""
    drive = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    monkeypatch.setattr(rows, "sampling", {"temperature": 0.6, "top_p": 0.9})
    service, asked = Service(rows, "tiny"), []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        chunk = {"choices": [{"delta": {"content": MARKDOWN}, "finish_reason": "stop"}], "usage": None}
        route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    with served(service) as url, drive.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.route("**/v1/chat/completions", answer)
        page.goto(url)
        page.click("summary")
        assert page.get_attribute("#temperature", "placeholder") == "0.6"
        assert page.text_content("#own") == "the model's own: temperature 0.6, top_p 0.9"
        for turn in range(2):
            page.fill("#text", "hi")
            page.press("#text", "Enter")
            page.wait_for_selector(f".note >> nth={turn}")
            page.fill("#system", "brief")
            page.fill("#temperature", "0.2")
        found = page.eval_on_selector_all(
            ".assistant >> nth=0 >> xpath=./*", "all => all.map((e) => [e.localName, e.className, e.textContent])"
        )
        assert [tuple(block) for block in found] == SHOWN
        inner = page.eval_on_selector_all(
            ".assistant >> nth=0 >> css=strong, em, code", "all => all.map((e) => e.localName)"
        )
        assert inner[:3] == ["strong", "em", "code"]
        browser.close()
    assert "temperature" not in asked[0]
    assert [m["role"] for m in asked[0]["messages"]] == ["user"]
    assert asked[1]["temperature"] == 0.2
    assert asked[1]["messages"][0] == {"role": "system", "content": "brief"}
    assert [m["role"] for m in asked[1]["messages"]] == ["system", "user", "assistant", "user"]


@pytest.mark.slow  # a browser takes seconds to start
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_chat_in_a_browser(alone: DecodeSession, rows: DecodeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong key and the right one, two turns that are those of the session, a stop, an error, a new chat."""
    drive = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    service = Service(rows, "tiny", ["secret"])

    def greedy(route: Any) -> None:
        body = route.request.post_data_json
        long = "long" in body["messages"][-1]["content"]
        limit = {"ignore_eos": True} if long else {"max_tokens": 20}
        route.continue_(post_data=json.dumps(body | {"temperature": 0} | limit))

    with served(service) as url, drive.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request", lambda request: None if request.url.startswith((url, "data:")) else problems.append(request.url)
        )
        page.route("**/v1/chat/completions", greedy)
        page.goto(url)
        for key, answer in (("wrong", "text=no valid API key"), ("secret", "#text")):
            page.fill("#key", key)
            page.press("#key", "Enter")
            page.wait_for_selector(answer)
        assert page.text_content("#model") == "tiny"

        messages: list[dict[str, str]] = []
        for turn, text in enumerate(("the cache", "<b>more</b>")):
            page.fill("#text", text)
            page.press("#text", "Enter")
            page.wait_for_selector(f".note >> nth={turn}")
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": alone.chat(messages, max_new_tokens=20).text})
        assert page.locator(".user").all_text_contents() == [m["content"] for m in messages[::2]]
        said = page.eval_on_selector_all(".assistant", "boxes => boxes.map((box) => box.dataset.said)")
        assert said == [m["content"] for m in messages[1::2]]
        assert page.text_content(".note").startswith("20 tokens in")

        step = rows.step
        monkeypatch.setattr(rows, "step", lambda: (time.sleep(0.02), step())[1])  # or it ends before the stop
        page.fill("#text", "long")
        page.click("#send")
        until(lambda: len(page.text_content(".assistant >> nth=2")) > 30)
        until(lambda: page.text_content("#rows") == "rows 1 of 4")
        page.click("#stop")
        page.wait_for_selector("text=stopped")
        until(lambda: not service.core.running)
        page.fill("#text", "#" * 600)
        page.click("#send")
        page.wait_for_selector("text=the model takes 512")

        page.click("#again")
        assert page.locator(".said").count() == 0
        browser.close()
    assert not problems
