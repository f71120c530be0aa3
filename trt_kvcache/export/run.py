"""Exports a checkpoint: chooses an exporter, runs it, compares the result, and copies tokenizer and configs."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trt_kvcache.arguments import as_path, as_switch, as_whole, shown
from trt_kvcache.engine.engine_folder import copy_texts, new_folders
from trt_kvcache.errors import InvalidModelError, OptionError, OutputError, TrtKvCacheError, UnsupportedModelError
from trt_kvcache.export import from_gguf
from trt_kvcache.export.interpreter import Interpreter
from trt_kvcache.export.reason import failure_reason, warnings_in
from trt_kvcache.export.twins import Twin, Verdict, judge_weights
from trt_kvcache.importer import plan_model
from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions
from trt_kvcache.machine import free_memory
from trt_kvcache.model_paths import checkpoint_named, is_checkpoint
from trt_kvcache.progress import phase

__all__ = ["DTYPES", "EXPORTERS", "Export", "export_checkpoint", "fill", "installed"]

DTYPES = ("float16", "bfloat16", "float32")
_HERE = Path(__file__).parent
_INSTALL = "pip install torch transformers onnxscript"
_MINUTES = (30, 2)  # time limit of an exporter: for any checkpoint, and for each GB of it
_ROOM = 4 << 30  # bytes that two interpreters with torch take, without weights
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_MOBIUS = """\
import sys
from mobius import build
build(sys.argv[1], dtype=sys.argv[3]).save(sys.argv[2], progress_bar=False)
"""


@dataclass(frozen=True)
class Exporter:
    """How to run one of the exporters, such as torch or optimum, and what it can write.

    Attributes:
        modules: modules that must be importable.
        command: function of checkpoint, folder, dtype and int4 that returns the arguments for the Python interpreter.
        dtypes: dtypes that the exporter can write on a CPU.
        int4: True if it can quantize weights to 4 bits.
        install: the command that installs it.
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
        lambda checkpoint, folder, dtype, _: [f"{_HERE}/with_torch.py", checkpoint, folder, dtype],
        DTYPES,
        _INSTALL,
    ),
    "optimum": Exporter(
        ("optimum.exporters.onnx",),
        lambda checkpoint, folder, *_: [f"{_HERE}/with_optimum.py", checkpoint, folder],
        ("float32",),
        "pip install optimum-onnx",
    ),
}
"""Exporters by name, fastest first. torch exports most architectures, but takes ten times as long as the first two."""


@dataclass(frozen=True)
class Export:
    """The result of an export: the name of the exporter that made the model, and the model's plan."""

    exporter: str
    plan: CachePlan


def installed(python: str = sys.executable) -> list[str]:
    """Return the exporters in the environment of an interpreter; raise `OptionError` if it does not run."""
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
        exporter: a name in `EXPORTERS`. ``"auto"``: try the installed exporters that support the checkpoint, fastest
            first; keep the first model that can be planned and computes the same as the checkpoint.
        dtype: dtype of weights, activations and caches, one of `DTYPES`.
        int4: quantize weights to 4 bits.
        capacity: tokens per sequence, for caches that grow; None: see `PlanOptions`.
        python: path of the interpreter in the environment with the exporter.
        told: called with lines for the user: each command before it runs, warnings, and why an exporter failed.

    Returns:
        The exporter that made the model, and the plan.

    Raises:
        InvalidModelError: there is no checkpoint, or transformers cannot read the GGUF file.
        OptionError: no exporter supports this, or no exporter is installed; the message says what to install.
        OutputError: the folder cannot be written, or is not empty.
        UnsupportedModelError: the exporters fail on this checkpoint, or write another model than the checkpoint.
    """
    source = checkpoint_named(as_path(checkpoint, "checkpoint"))
    if not is_checkpoint(source):
        raise InvalidModelError(
            f"{source}: not a checkpoint; give a folder with config.json and weights (.safetensors), as transformers' "
            "save_pretrained writes it, or a .gguf file"
        )
    folder = as_path(output, "output", OutputError).expanduser().absolute()
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise OutputError(f"{folder}: the folder is not empty; give a new one")
    python = str(as_path(python, "python"))
    capacity = None if capacity is None else as_whole(capacity, "capacity", "tokens")
    if not callable(told):
        raise OptionError(f"argument 'told' must be a function that takes one string; got {shown(told)}")
    names = _chosen(exporter, dtype, python, int4=as_switch(int4, "int4"))
    with (
        new_folders(folder),
        _emptied(folder) as keep,
        Interpreter(python, EXPORTERS[names[0]].modules) as interpreter,
        _checkpoint_of(source, folder, dtype, interpreter, told) as read,
        _Job(source, read, folder, dtype, int4, capacity, interpreter, told) as job,
    ):
        result = job.first(names) if len(names) > 1 else job.only(names[0], keep)
        keep()
    return result


def fill(checkpoint: Path, folder: Path, run: Callable[[], tuple[int, str]]) -> list[str]:
    """Run an exporter into a new folder, copy the checkpoint's tokenizer and configs there, and return the warnings.

    `run` returns the exporter's exit code and stderr. Raises `UnsupportedModelError` if it fails, or writes no model.
    """
    folder.mkdir()
    code, stderr = run()
    if code or next(folder.rglob("*.onnx"), None) is None:
        raise UnsupportedModelError(failure_reason(stderr) or "it wrote no model")
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    copy_texts(checkpoint, folder, missing_too=False)
    return warnings_in(stderr)


class _Job:
    """The export of a checkpoint. Its ``with`` block makes a twin: a small random checkpoint of the same settings."""

    def __init__(
        self, source: Path, checkpoint: Path, folder: Path, dtype: str, int4: bool, capacity: int | None,
        interpreter: Interpreter, told: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._source, self._checkpoint, self._folder, self._capacity = source, checkpoint, folder, capacity
        self._dtype, self._int4, self._interpreter, self._told = dtype, int4, interpreter, told
        self._size = sum(file.stat().st_size for file in checkpoint.glob("*") if file.is_file())
        self._seconds = 60.0 * (_MINUTES[0] + _MINUTES[1] * self._size / 1e9)

    def __enter__(self) -> _Job:
        self._temporary = tempfile.TemporaryDirectory(dir=self._folder, prefix="twin-", ignore_cleanup_errors=True)
        self._twin = Twin(self._checkpoint, Path(self._temporary.name), self._run, self._capacity)
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def only(self, name: str, keep: Callable[[], None]) -> Export:
        """Export with this exporter. Keep a model that cannot be planned; delete one that computes wrong numbers."""
        made = self._folder / name
        try:
            self._export(name)
        except UnsupportedModelError as error:
            raise self._failed([f"{name}: {error.message}"], self._right_others(name)) from None
        try:
            plan = plan_model(made, PlanOptions(capacity=self._capacity))
        except TrtKvCacheError:
            _move_up(made)
            keep()
            plan_model(self._folder, PlanOptions(capacity=self._capacity))  # the same error, with the file's final path
            raise
        self._compare_weights(name, plan)
        _move_up(made)
        return Export(name, plan)

    def first(self, names: Sequence[str]) -> Export:
        """Try these exporters in turn. Return the first export that can be planned, has caches, and is correct."""
        failures: list[str] = []
        for name in names:
            if failures:
                self._told(f"failed, {failures[-1]}; trying {name}")
            try:
                self._export(name)
                plan = plan_model(self._folder / name, PlanOptions(capacity=self._capacity))
                if not plan.caches:
                    raise UnsupportedModelError("its model has no caches")
                self._compare_weights(name, plan)
            except TrtKvCacheError as error:
                failures.append(f"{name}: {error.message}")
                continue
            if failures:
                self._told(f"the model is {name}'s")
            _move_up(self._folder / name)
            return Export(name, plan)
        raise self._failed(failures)

    def _export(self, name: str) -> None:
        """Export the checkpoint; raise UnsupportedModelError if the exporter fails, or is wrong on the small twin."""
        verdict = self._judge(name)
        if verdict.is_right is False:
            left = self._twin.settings(name, verdict)
            raise UnsupportedModelError(
                f"it writes another model than the checkpoint: {verdict.said}; "
                + (f"it leaves out {' or '.join(left)}" if left else "no single setting accounts for it")
            )
        self._run_exporter(name, self._checkpoint, self._folder / name, self._seconds)
        if verdict.is_right is None:
            self._told(f"{name}'s model is not compared with the checkpoint: {verdict.said}")

    def _judge(self, name: str) -> Verdict:
        with phase(f"comparing {name} with transformers on a small twin"):
            return self._twin.judge(name, partial(self._run_exporter, name))

    def _run(self, words: Sequence[str], seconds: float) -> tuple[int, str]:
        return self._interpreter.run(words, "comparing with transformers", seconds)

    def _run_exporter(self, name: str, checkpoint: Path, folder: Path, seconds: float) -> None:
        """Run an exporter, and report its warnings, except for the small twin, whose warnings would repeat."""
        command = EXPORTERS[name].command(str(checkpoint), str(folder), self._dtype, self._int4)
        tell = self._told if checkpoint == self._checkpoint else lambda _: None
        tell(f"running {name}: {shlex.join([self._interpreter.python, *command])}")
        for line in fill(checkpoint, folder, lambda: self._interpreter.run(command, f"exporting with {name}", seconds)):
            tell(f"{name} warns: {line}")

    def _compare_weights(self, name: str, plan: CachePlan) -> None:
        """Raise UnsupportedModelError if logits of export and checkpoint differ. If not compared, tell the user why."""
        needed = 3 * self._size + _ROOM // 2
        if self._int4:
            self._told("the weights are not compared with the checkpoint's: they were rounded to 4 bits")
        elif needed > free_memory():
            self._told(
                f"the weights are not compared with the checkpoint's: that takes {needed / 1e9:.0f} GB of memory, and "
                f"{free_memory() / 1e9:.0f} GB are free"
            )
        else:
            with phase("comparing a few tokens with transformers"):
                verdict = judge_weights(
                    self._checkpoint, self._folder / name, plan, Path(self._temporary.name), self._run, self._seconds
                )
            if verdict.is_right is False:
                raise UnsupportedModelError(f"{name} writes other weights than the checkpoint's: {verdict.said}")
            if verdict.is_right is None:
                self._told(f"the weights are not compared with the checkpoint's: {verdict.said}")

    def _right_others(self, name: str) -> list[str]:
        """Return the names of the other exporters that support this dtype and export a small random model correctly."""
        fits = _chosen("auto", self._dtype, self._interpreter.python, int4=self._int4)
        with phase("trying other exporters on a small twin"):
            verdicts = {other: self._judge(other) for other in fits if other != name}
        return [other for other, verdict in verdicts.items() if verdict.is_right]

    def _failed(self, failures: Sequence[str], right: Sequence[str] = ()) -> UnsupportedModelError:
        others = "leave out --int4, which no other exporter writes" if self._int4 else "try another --exporter"
        advice = f"use {right[0]}, which is right" if right else f"{others}, or a later version of it"
        return UnsupportedModelError(f"{self._source} is not exported: {'; '.join(failures)}; {advice}")


def _move_up(folder: Path) -> None:
    """Move the files of a folder to its parent folder, and delete everything else in the parent."""
    for path in folder.parent.iterdir():
        if path != folder:
            _remove(path)
    # A random name: the exporter may have written a folder of the same name as `folder`.
    moved = folder.rename(folder.with_name(f".{folder.name}-{secrets.token_hex(4)}"))
    for path in list(moved.iterdir()):
        path.rename(moved.parent / path.name)
    moved.rmdir()


@contextmanager
def _checkpoint_of(
    source: Path, folder: Path, dtype: str, interpreter: Interpreter, told: Callable[[str], None]
) -> Iterator[Path]:
    """Yield the folder of a checkpoint. A GGUF file is converted to a temporary folder, which is deleted afterwards."""
    if source.is_dir():
        yield source
        return
    python, wanted = interpreter.python, from_gguf.MODULES
    if missing := [module for module in wanted if module not in _importable(python, wanted)]:
        raise OptionError(
            f"{source}: transformers reads a GGUF file, and {' and '.join(missing)} {'are' if missing[1:] else 'is'} "
            f"missing; pip install {' '.join(missing)}"
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix="checkpoint-", ignore_cleanup_errors=True) as temporary:
        words = [python, str(Path(from_gguf.__file__)), str(source), temporary, dtype]
        told(f"reading {source.name}: {shlex.join(words)}")
        code, stderr = interpreter.run(words[1:], f"reading {source.name}")
        if code:
            raise InvalidModelError(
                f"{source} is not read: {failure_reason(stderr)}; give the checkpoint that it was made of"
            )
        yield Path(temporary)


def _chosen(exporter: str, dtype: str, python: str, *, int4: bool) -> Sequence[str]:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise OptionError(f"dtype is {shown(dtype)}; it must be one of {', '.join(DTYPES)}")
    if not isinstance(exporter, str) or exporter not in ("auto", *EXPORTERS):
        raise OptionError(f"exporter is {shown(exporter)}; it must be one of auto, {', '.join(EXPORTERS)}")
    able = [n for n, e in EXPORTERS.items() if (e.int4 or not int4) and dtype in e.dtypes]
    fits = [name for name in able if exporter in ("auto", name)]
    asked = f"{dtype} with weights of 4 bits" if int4 else dtype
    if not fits:
        other = {d: n for n, e in EXPORTERS.items() for d in e.dtypes if e.int4 and exporter in ("auto", n)}
        hint = f"use {' or '.join(able)}" if able else ", ".join(f"--dtype {d} by {n}" for d, n in other.items())
        raise OptionError(
            f"{'no exporter writes' if exporter == 'auto' else f'{exporter} does not write'} {asked} on a CPU"
            f"; {hint or 'leave out --int4'}"
        )
    if not (usable := [name for name in installed(python) if name in fits]):
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
    """Empty a folder when the ``with`` block ends, unless the block calls the yielded function to keep the files."""
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
