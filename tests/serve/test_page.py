"""The page at `/`: offline, and one script."""

import asyncio
import base64
import hashlib
import re

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed (extra: serve)")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra: serve)")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from serve.asgi import ask

from trt_kvcache import DecodeSession
from trt_kvcache.serve.service import Service


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
