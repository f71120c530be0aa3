"""Windows' limits, laid over Linux: ``python windows_stand_in.py MODEL FOLDER`` does the main jobs so.

No fcntl and no resource, ``sys.platform`` says win32, and a file that somebody has open is neither moved nor removed.
Other packages are imported before, as they are built for the system that really runs.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OTHERS = (
    "asyncio blake3 cuda.core msgspec numpy onnx onnx_graphsurgeon onnxruntime psutil rich.console safetensors typer"
)


def lay_over() -> None:
    """Make this process look like one on Windows to what is imported from here on."""
    for name in _OTHERS.split():
        __import__(name)
    lacking: Any = None
    sys.modules.update(fcntl=lacking, resource=lacking)
    subprocess.CREATE_NEW_PROCESS_GROUP = 0  # type: ignore[attr-defined]
    for name, names in (("replace", 2), ("rename", 2), ("unlink", 1), ("remove", 1)):
        setattr(os, name, _refusing(getattr(os, name), names))
    del os.O_NOFOLLOW
    sys.platform = "win32"


def _refusing(call: Callable[..., None], names: int) -> Callable[..., None]:
    def refuse(*args: Any, **more: Any) -> None:
        for path in args[:names]:
            if Path(path).exists() and any(_is(path, held) for held in Path("/proc/self/fd").iterdir()):
                raise PermissionError(13, "The process cannot access the file because it is in use", str(path))
        call(*args, **more)

    return refuse


def _is(path: Any, held: Path) -> bool:
    try:
        return held.samefile(path)
    except OSError:  # closed meanwhile
        return False


def main(model: str, folder: Path) -> None:
    """Rewrite, build and inspect the model; decode, save its caches twice and load them."""
    lay_over()
    from trt_kvcache import BuildOptions, DecodeSession, GenerationConfig, build_engine, inspect_engine, rewrite_model

    rewrite_model(model, folder / "rewritten.onnx")
    rewrite_model(model, folder / "rewritten.onnx")  # in the place of the first
    build_engine(model, folder / "model.engine", build=BuildOptions(max_chunk=4))
    inspect_engine(folder / "model.engine")
    with DecodeSession.open(model, device="cpu") as session:
        slot = session.add([1, 2, 3], GenerationConfig(max_new_tokens=4))
        session.step()
        for _ in range(2):
            session.cache.save(folder / "saved.safetensors")
        session.remove(slot)
        session.cache.load(folder / "saved.safetensors")
    print(*sorted(path.name for path in folder.iterdir()))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
