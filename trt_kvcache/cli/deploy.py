"""``trt-kvcache deploy``: writes the files that another server needs to run an engine or a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trt_kvcache.cli.options import file_argument, named_folders, output_flag
from trt_kvcache.model_paths import runnable_named


def deploy(
    server: Annotated[Literal["triton"], typer.Argument(metavar="triton", help="NVIDIA Triton Inference Server.")],
    model: Annotated[
        Path,
        file_argument(
            metavar="ENGINE|MODEL", help="Folder of an engine or a model. It is copied.", callback=runnable_named
        ),
    ],
    output: Annotated[
        Path, output_flag(metavar="FOLDER", help="Folder of the model repository, which may hold other models.")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model name in the repository. Default: the folder's.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Largest batch. Default: the engine's, else 8.")
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            "--capacity", "-c", min=1, metavar="TOKENS", help="Tokens per sequence, for a model whose caches grow."
        ),
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="How many sequences may wait. Default: 256.")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="Adapter (LoRA) that requests may choose. It is copied."),
    ] = None,
) -> None:
    """Write a model repository for Triton. One session runs all requests, which can stream and be cancelled."""
    from trt_kvcache.cli.output import console, print_warnings
    from trt_kvcache.cli.summary import print_next
    from trt_kvcache.errors import OptionError
    from trt_kvcache.model_paths import is_model
    from trt_kvcache.serve.repository import write_repository

    if capacity is not None and not is_model(model):
        raise OptionError(
            f"--capacity {capacity} is for models, and {model} looks like an engine, which has its own; leave it out"
        )
    options = {"max_batch": max_batch, "capacity": capacity, "max_queue": max_queue}
    parameters = {key: value for key, value in options.items() if value is not None}
    adapters = named_folders(lora or [], "--lora")
    written = write_repository(model, output, name or model.resolve().name, parameters, adapters)
    if not (model / "tokenizer.json").is_file():
        print_warnings(["there is no tokenizer: the model takes input_ids and gives output_ids"])
    out = console()
    out.print(f"{written}: config.pbtxt, 1/model.py, 1/model/{', 1/adapters/' if adapters else ''}")
    print_next(out, f"tritonserver --model-repository {output}")
