"""Runs an exporter on a checkpoint: which one, how, and with what beside the model."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trt_kvcache.arguments import as_path
from trt_kvcache.engine.folder import copy_texts, new_folders
from trt_kvcache.errors import InvalidModelError, OptionError, OutputError, TrtKvCacheError, UnsupportedModelError
from trt_kvcache.export import from_gguf
from trt_kvcache.export.grade import shortfalls
from trt_kvcache.export.reason import failure_reason
from trt_kvcache.importer import plan_model
from trt_kvcache.importer.plan import CachePlan, PlanOptions
from trt_kvcache.names import checkpoint_named, is_checkpoint
from trt_kvcache.progress import phase

__all__ = ["DTYPES", "EXPORTERS", "Export", "export_checkpoint", "installed"]

DTYPES = ("float16", "bfloat16", "float32")
_INSTALL = "pip install torch transformers onnxscript"
_LINE = 80  # characters of an exporter's output that are shown as what it does
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_MOBIUS = """\
import sys
from mobius import build
build(sys.argv[1], dtype=sys.argv[3]).save(sys.argv[2], progress_bar=False)
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
    # The builder cannot quantize a table that embeddings and lm_head share for this provider (version 0.18).
    untied = ["--extra_options", "shared_embeddings=false"] if int4 and dtype == "float16" else []
    return [*words, "-c", f"{folder}/.cache", *untied]


EXPORTERS = {
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
    "optimum": Exporter(
        ("optimum.exporters.onnx",),
        lambda checkpoint, folder, *_: [str(Path(__file__).with_name("with_optimum.py")), checkpoint, folder],
        ("float32",),
        "pip install optimum-onnx",
    ),
}
"""By name, the fastest first. torch takes most architectures, and ten times as long as those before it."""


@dataclass(frozen=True)
class Export:
    """A model that an exporter made.

    Attributes:
        exporter: its name.
        plan: of the model.
    """

    exporter: str
    plan: CachePlan


def installed(python: str = sys.executable) -> list[str]:
    """Return the names of the exporters that an interpreter finds.

    Args:
        python: the interpreter.

    Raises:
        OptionError: it does not run.
    """
    there = _importable(python, {module for exporter in EXPORTERS.values() for module in exporter.modules})
    return [name for name, exporter in EXPORTERS.items() if there.issuperset(exporter.modules)]


def _importable(python: str, modules: Collection[str]) -> set[str]:
    code = (
        "import sys\nfrom importlib.util import find_spec\n"
        "def there(name):\n    try:\n        return find_spec(name) is not None\n    except ImportError:\n"
        "        return False\n"
        "print(*filter(there, sys.argv[1:]))"
    )
    try:
        done = subprocess.run([python, "-c", code, *modules], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OptionError(f"{python}: this interpreter does not run: {error}") from None
    if done.returncode:
        raise OptionError(f"{python}: this interpreter does not run: {failure_reason(done.stderr)}")
    return set(done.stdout.split())


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    exporter: str = "auto",
    dtype: str = "float16",
    int4: bool = False,
    capacity: int | None = None,
    python: str = sys.executable,
    told: Callable[[str], None] = lambda _: None,
) -> Export:
    """Export a checkpoint, copy tokenizer, chat template and configs beside the model, and plan it.

    Nothing is downloaded: exporters run offline.

    Args:
        checkpoint: folder with ``config.json`` and weights; or a GGUF file, which transformers dequantizes first.
        output: folder of the model; new or empty.
        exporter: one of the names of `EXPORTERS`. ``"auto"``: the first of them that is installed and fits, and whose
            model is as good as any (`shortfalls`); if none is, the best of those that are taken.
        dtype: of weights, activations and caches, one of `DTYPES`.
        int4: weights of 4 bits.
        capacity: of the plan, for caches that grow; None: see `PlanOptions`.
        python: interpreter of the environment with the exporter.
        told: called with each command before it runs, and with the reason why another exporter follows.

    Returns:
        The exporter that made the model, and the plan.

    Raises:
        InvalidModelError: there is no checkpoint, or transformers does not read the file.
        OptionError: no exporter fits, or none is installed; the message says what to install.
        OutputError: the folder cannot be written, or holds something.
        UnsupportedModelError: the exporters fail on this checkpoint.
    """
    source = checkpoint_named(as_path(checkpoint, "checkpoint"))
    if not is_checkpoint(source):
        raise InvalidModelError(
            f"{source}: no checkpoint; give a folder with config.json and weights (.safetensors), as transformers' "
            "save_pretrained writes it, or a .gguf file"
        )
    folder = as_path(output, "output", OutputError).expanduser().absolute()
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise OutputError(f"{folder}: it holds something; give a new folder")
    names = _chosen(exporter, dtype, python, int4=int4)
    with new_folders(folder), _emptied(folder) as keep, _checkpoint_of(source, folder, dtype, python, told) as read:
        job = _Job(source, read, folder, dtype, int4, python, told)
        result = _best(job, names, capacity) if len(names) > 1 else _only(job, names[0], keep, capacity)
        keep()
    return result


@dataclass(frozen=True)
class _Job:
    """A checkpoint, the folder that it is read from, and what is wanted of it."""

    source: Path
    checkpoint: Path
    folder: Path
    dtype: str
    int4: bool
    python: str
    told: Callable[[str], None]

    def export(self, name: str, folder: Path) -> None:
        """Fill a folder by an exporter.

        Raises:
            UnsupportedModelError: it fails.
        """
        folder.mkdir()
        command = EXPORTERS[name].command(str(self.checkpoint), str(folder), self.dtype, self.int4)
        words = [self.python, *command]
        self.told(f"running {name}: {shlex.join(words)}")
        code, stderr = _run(words, f"exporting with {name}")
        if code or next(folder.rglob("*.onnx"), None) is None:
            raise UnsupportedModelError(failure_reason(stderr) or "it wrote no model")
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        copy_texts(self.checkpoint, folder, missing_too=False)

    def failed(self, failures: Sequence[str]) -> UnsupportedModelError:
        """The error that says what each exporter said."""
        others = "leave out --int4, which no other exporter writes" if self.int4 else "try another --exporter"
        return UnsupportedModelError(
            f"{self.source} is not exported: {'; '.join(failures)}; {others}, or a later version of it"
        )


def _only(job: _Job, name: str, keep: Callable[[], None], capacity: int | None) -> Export:
    """Export with one exporter; its model stays where the plan is refused."""
    try:
        job.export(name, job.folder / name)
    except UnsupportedModelError as error:
        raise job.failed([f"{name}: {error.message}"]) from None
    _move_up(job.folder / name)
    keep()
    return Export(name, plan_model(job.folder, PlanOptions(capacity=capacity)))


def _best(job: _Job, names: Sequence[str], capacity: int | None) -> Export:
    """Return the first export that no other can beat; else that with the fewest shortfalls."""
    failures: list[str] = []
    exports: list[tuple[int, Export]] = []
    for name in names:
        try:
            job.export(name, job.folder / name)
            export = Export(name, plan_model(job.folder / name, PlanOptions(capacity=capacity)))
        except TrtKvCacheError as error:
            failures.append(f"{name}: {error.message}")
            if name != names[-1]:
                job.told(f"failed, {failures[-1]}")
            continue
        short = shortfalls(job.folder / name, export.plan)
        exports.append((len(short), export))
        if not short:
            break
        job.told(f"{name} wrote a model that another exporter may write better: {'; '.join(short)}")
    if not exports:
        raise job.failed(failures)
    _, best = min(exports, key=lambda each: each[0])
    if len(exports) > 1 or failures:
        job.told(f"the model is {best.exporter}'s")
    _move_up(job.folder / best.exporter)
    return best


def _move_up(folder: Path) -> None:
    """Move the files of a folder to the folder that it lies in, in place of all that is there."""
    for path in folder.parent.iterdir():
        if path != folder:
            _remove(path)
    # An exporter may write a folder of its own name.
    moved = folder.rename(folder.with_name(f".{folder.name}-{secrets.token_hex(4)}"))
    for path in list(moved.iterdir()):
        path.rename(moved.parent / path.name)
    moved.rmdir()


@contextmanager
def _checkpoint_of(source: Path, folder: Path, dtype: str, python: str, told: Callable[[str], None]) -> Iterator[Path]:
    """Give the folder of a checkpoint; that of a GGUF file is there as long as the block."""
    if source.is_dir():
        yield source
        return
    if missing := [module for module in from_gguf.MODULES if module not in _importable(python, from_gguf.MODULES)]:
        raise OptionError(
            f"{source}: transformers reads a GGUF file, and {' and '.join(missing)} {'are' if missing[1:] else 'is'} "
            f"missing; pip install {' '.join(missing)}"
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix="checkpoint-", ignore_cleanup_errors=True) as temporary:
        words = [python, str(Path(from_gguf.__file__)), str(source), temporary, dtype]
        told(f"reading {source.name}: {shlex.join(words)}")
        code, stderr = _run(words, f"reading {source.name}")
        if code:
            raise InvalidModelError(
                f"{source} is not read: {failure_reason(stderr)}; give the checkpoint that it was made of"
            )
        yield Path(temporary)


def _run(words: Sequence[str], title: str) -> tuple[int, str]:
    """Run a command, whose last line on stdout is the phase that it is in; return its exit code and its stderr."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        phase(title),
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=said, env=_environment(), encoding="utf-8", errors="replace"
        ) as child,
    ):
        try:
            assert child.stdout is not None
            with ExitStack() as step:
                for line in child.stdout:
                    if line.strip():
                        step.close()
                        step.enter_context(phase(line.strip()[:_LINE]))
            code = child.wait()
        except BaseException:
            child.kill()
            raise
        said.seek(0)
        return code, said.read()


def _chosen(exporter: str, dtype: str, python: str, *, int4: bool) -> Sequence[str]:
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if exporter != "auto" and exporter not in EXPORTERS:
        raise OptionError(f"exporter is {exporter!r}; it must be one of auto, {', '.join(EXPORTERS)}")
    fits = [n for n, e in EXPORTERS.items() if (e.int4 or not int4) and dtype in e.dtypes and exporter in ("auto", n)]
    asked = f"{dtype} with weights of 4 bits" if int4 else dtype
    if not fits:
        able = [n for n, e in EXPORTERS.items() if (e.int4 or not int4) and dtype in e.dtypes]
        other = {d: n for n, e in EXPORTERS.items() for d in e.dtypes if e.int4 and exporter in ("auto", n)}
        hint = f"use {' or '.join(able)}" if able else ", ".join(f"--dtype {d} by {n}" for d, n in other.items())
        raise OptionError(
            f"{'no exporter writes' if exporter == 'auto' else f'{exporter} does not write'} {asked} on a CPU"
            f"; {hint or 'leave out --int4'}"
        )
    there = installed(python)
    usable = [name for name in fits if name in there]
    if not usable:
        asked_for, why = fits[0], ""
        if "torch" in fits:
            asked_for, why = "torch", " (it takes most architectures, in each type, with caches that grow)"
        raise OptionError(
            f"no exporter for {asked} is installed{'' if exporter == 'auto' else f': {exporter} is missing'}; "
            f"{EXPORTERS[asked_for].install}{why}"
        )
    return usable


@contextmanager
def _emptied(folder: Path) -> Iterator[Callable[[], None]]:
    """Empty a folder at the end of the block, unless the function that it gives is called."""
    calls = []
    try:
        yield lambda: calls.append(True)
    finally:
        if not calls:
            for path in list(folder.iterdir()):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **offline, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
