"""Runs an exporter on a checkpoint: which one, how, and with what beside the model."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trt_kvcache.engine.folder import copy_texts, is_checkpoint, made_folders
from trt_kvcache.errors import InvalidModelError, OptionError, OutputError, UnsupportedModelError
from trt_kvcache.given import given_path

__all__ = ["DTYPES", "EXPORTERS", "export_checkpoint", "installed"]

DTYPES = ("float16", "bfloat16", "float32")
_WITH_TORCH = Path(__file__).with_name("with_torch.py")
_INSTALL = "pip install torch transformers onnxscript"
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_MOBIUS = """\
import sys
from mobius import build
build(sys.argv[1], dtype=sys.argv[3]).save(sys.argv[2], progress_bar=False)
"""
_OPTIMUM = """\
import sys
from optimum.exporters.onnx import main_export
main_export(sys.argv[1], sys.argv[2], task="text-generation-with-past", no_post_process=True, do_validation=False)
"""


@dataclass(frozen=True)
class Exporter:
    """The way to run one exporter.

    Attributes:
        modules: what has to be importable.
        command: the words after the interpreter, of checkpoint, folder, dtype and int4.
        dtypes: that it writes on a CPU.
        int4: whether it quantizes weights to 4 bits.
        install: what gives it.
    """

    modules: tuple[str, ...]
    command: Callable[[str, str, str, bool], list[str]]
    dtypes: tuple[str, ...]
    install: str
    int4: bool = False


def _with_genai(checkpoint: str, folder: str, dtype: str, int4: bool) -> list[str]:
    precision = "int4" if int4 else {"float16": "fp16", "float32": "fp32"}[dtype]
    provider = "NvTensorRtRtx" if dtype == "float16" else "cpu"
    words = ["-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", folder, "-p", precision, "-e", provider]
    return [*words, "-c", f"{folder}/.cache"]


EXPORTERS = {
    "torch": Exporter(
        ("torch", "transformers.exporters", "onnxscript"),
        lambda checkpoint, folder, dtype, _: [
            str(Path(__file__).with_name("with_torch.py")),
            checkpoint,
            folder,
            dtype,
        ],
        DTYPES,
        _INSTALL,
    ),
    "mobius": Exporter(
        ("mobius",),
        lambda checkpoint, folder, dtype, _: ["-c", _MOBIUS, checkpoint, folder, _SHORT[dtype]],
        DTYPES,
        "pip install mobius-onnx",
    ),
    "genai": Exporter(
        ("onnxruntime_genai.models", "torch", "transformers"),
        _with_genai,
        ("float16", "float32"),
        "pip install onnxruntime-genai torch transformers",
        int4=True,
    ),
    "optimum": Exporter(
        ("optimum.exporters.onnx",),
        lambda checkpoint, folder, *_: ["-c", _OPTIMUM, checkpoint, folder],
        ("float32",),
        "pip install optimum-onnx",
    ),
}
"""By name, in the order of preference: torch takes most architectures in every type, with caches that grow."""


def installed(python: str = sys.executable) -> list[str]:
    """Return the names of the exporters that an interpreter finds.

    Args:
        python: the interpreter.

    Raises:
        OptionError: it does not run.
    """
    code = (
        "import sys\nfrom importlib.util import find_spec\n"
        "def there(name):\n    try:\n        return find_spec(name) is not None\n    except ImportError:\n"
        "        return False\n"
        "print(*(n for n in sys.argv[1:] if all(map(there, n.split('=')[1].split(',')))))"
    )
    asked = [f"{name}={','.join(exporter.modules)}" for name, exporter in EXPORTERS.items()]
    try:
        done = subprocess.run([python, "-c", code, *asked], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OptionError(f"{python}: this interpreter does not run: {error}") from None
    if done.returncode:
        raise OptionError(f"{python}: this interpreter does not run: {_last_line(done.stderr)}")
    return [word.partition("=")[0] for word in done.stdout.split()]


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    exporter: str = "auto",
    dtype: str = "float16",
    int4: bool = False,
    python: str = sys.executable,
    told: Callable[[str], None] = lambda _: None,
) -> str:
    """Export a checkpoint, and copy tokenizer, chat template and configs beside the model.

    Nothing is downloaded: exporters run offline.

    Args:
        checkpoint: folder with ``config.json`` and weights.
        output: folder of the model; new or empty.
        exporter: ``"auto"``: the first of `EXPORTERS` that is installed, fits and succeeds; or one of their names.
        dtype: of weights, activations and caches, one of `DTYPES`.
        int4: weights of 4 bits.
        python: interpreter of the environment with the exporter.
        told: called with each command before it runs, and with the failure of an exporter that another follows.

    Returns:
        The exporter that made the model.

    Raises:
        InvalidModelError: there is no checkpoint.
        OptionError: no exporter fits, or none is installed; the message says what to install.
        OutputError: the folder cannot be written, or holds something.
        UnsupportedModelError: the exporters fail on this checkpoint.
    """
    source = given_path(checkpoint, "checkpoint")
    if not is_checkpoint(source):
        raise InvalidModelError(
            f"{source}: no checkpoint; give a folder with config.json and weights (.safetensors), as transformers' "
            "save_pretrained writes it"
        )
    folder = given_path(output, "output", OutputError).expanduser().absolute()
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise OutputError(f"{folder}: it holds something; give a new folder")
    names = _chosen(exporter, dtype, python, int4=int4)
    failures = []
    with made_folders(folder):
        for at, name in enumerate(names):
            words = [python, *EXPORTERS[name].command(str(source), str(folder), dtype, int4)]
            told(f"running {name}: {shlex.join(words)}")
            with _emptied(folder) as keep:
                done = subprocess.run(words, capture_output=True, text=True, env=_offline(), errors="replace")
                if done.returncode == 0 and next(folder.rglob("*.onnx"), None) is not None:
                    shutil.rmtree(folder / ".cache", ignore_errors=True)
                    copy_texts(source, folder, missing_too=False)
                    keep()
                    return name
            failures.append(f"{name}: {_last_line(done.stderr) or 'it wrote no model'}")
            if at + 1 < len(names):
                told(f"failed, {failures[-1]}")
        raise UnsupportedModelError(
            f"{source} is not exported: {'; '.join(failures)}; try another --exporter, or a later version of it"
        )


def _chosen(exporter: str, dtype: str, python: str, *, int4: bool) -> Sequence[str]:
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if exporter != "auto" and exporter not in EXPORTERS:
        raise OptionError(f"exporter is {exporter!r}; it must be one of auto, {', '.join(EXPORTERS)}")
    fits = [n for n, e in EXPORTERS.items() if (e.int4 or not int4) and dtype in e.dtypes and exporter in ("auto", n)]
    asked = f"{dtype} with weights of 4 bits" if int4 else dtype
    if not fits:
        able = ", ".join(n for n, e in EXPORTERS.items() if (e.int4 or not int4) and dtype in e.dtypes)
        raise OptionError(f"{exporter} does not write {asked} on a CPU; {able} does")
    there = installed(python)
    found = [name for name in fits if name in there]
    if not found:
        why = " (it takes most architectures, in each type, with caches that grow)" if fits[0] == "torch" else ""
        raise OptionError(
            f"no exporter for {asked} is installed{'' if exporter == 'auto' else f': {exporter} is missing'}; "
            f"{EXPORTERS[fits[0]].install}{why}"
        )
    return found


@contextmanager
def _emptied(folder: Path) -> Iterator[Callable[[], None]]:
    """Empty a folder at the end of the block, unless the function that it gives is called."""
    kept = []
    try:
        yield lambda: kept.append(True)
    finally:
        if not kept:
            for path in list(folder.iterdir()):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def _offline() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()
