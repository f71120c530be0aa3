"""The documentation site: it quotes real messages, builds without a warning, and its notebook runs."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import onnx
import pytest
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from small_checkpoint import write_checkpoint

import trt_kvcache
from trt_kvcache import (
    BuildOptions,
    CachePlan,
    GenerationConfig,
    Manifest,
    PlanOptions,
    VerifyOptions,
    decoding,
    errors,
    plan,
    reports,
)  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", ["refused", "troubleshooting"])
def test_the_messages_that_are_quoted_exist(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \|", text.split("## 3.")[0], re.MULTILINE)
    words = (words for row in rows for words in re.findall("`([^`]+)`", row))
    quoted = [message for message in words if not message.startswith("trt-kvcache")]
    assert len(quoted) > 12
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "trt_kvcache").rglob("*.py")]
    joined = [re.sub(r'"\s*\n\s*f?"', "", source) for source in sources]  # a message may take several lines
    for message in quoted:
        parts = message.removeprefix("…: ").split("…")
        longest = max(parts, key=len)
        pattern = re.compile(".*".join(map(re.escape, parts)))
        assert any(longest in text and pattern.search(text) for text in joined), message


def test_the_manifests_page_has_every_field() -> None:
    page = (DOCS / "manifest.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    parts = [Manifest, CachePlan, reports.FileIdentity, reports.Profile, reports.ShapeRange]
    parts += [plan.CacheUpdate, plan.AttentionPlan, plan.Mask, plan.SpanInput, plan.LogitsSpan, plan.TensorRole]
    parts += [plan.StateUpdate, plan.UpdateContract, plan.InterfaceChange]
    missing = {f"{part.__name__}.{field.name}" for part in parts for field in fields(part) if field.name not in named}
    assert not missing


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """With the pages of README, commands and API; every link leads to a page."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra: docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {
        page: (tmp_path / page / "index.html").read_text(encoding="utf-8")
        for page in (".", "about", "cli", "api", "api-decoding", "api-plan", "api-reports")
    }
    reference = "".join(text for page, text in pages.items() if page.startswith("api"))
    assert "The capital of France is Paris." in pages["."]
    assert 'href="../serving/"' in pages["about"]
    assert "--compute-capabilities" in pages["cli"]
    for module in (trt_kvcache, errors, plan, decoding, reports):
        for name in set(module.__all__) - {"__version__"}:
            home = trt_kvcache if name in trt_kvcache.__all__ else module
            assert f'id="{home.__name__}.{name}"' in reference, name
    text = re.sub(r"<[^>]*>|\s", "", reference)
    for kind in (PlanOptions, BuildOptions, VerifyOptions, GenerationConfig):  # the defaults of each
        for default in (f for f in fields(kind) if isinstance(f.default, (int, float)) and f.default is not True):
            assert re.search(rf"{default.name}:[^,=]*={default.default}\b", text), default.name


def test_the_notebook_runs(tmp_path: Path) -> None:
    """A small decoder takes the place of the trained one; its outputs are of a run with that."""
    pytest.importorskip("nbclient", reason="nbclient is not installed (extra: docs)")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (extra: docs)")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    export = tmp_path / "docs" / "tutorial" / "my-export"
    write_checkpoint(export)
    shutil.copytree(export, export.with_name("my-checkpoint"))
    (export / "model.safetensors").unlink()
    onnx.save(make_foreign("concat", DecoderConfig(vocab=512)), export / "model.onnx")
    code = (
        "import sys, nbformat, nbclient;"
        "nbclient.NotebookClient(nbformat.read(sys.argv[1], 4), timeout=300, kernel_name='python3').execute()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(DOCS / "index.ipynb")],
        cwd=tmp_path / "docs",
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
