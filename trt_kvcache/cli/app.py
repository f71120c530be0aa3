"""The root command ``trt-kvcache``: collects the commands, and prints this package's errors on one line."""

from __future__ import annotations

import errno
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trt_kvcache import __version__
from trt_kvcache.cli.batch import batch
from trt_kvcache.cli.bench import bench
from trt_kvcache.cli.build import build
from trt_kvcache.cli.chat import chat
from trt_kvcache.cli.check import check
from trt_kvcache.cli.command import Command, first_sentence
from trt_kvcache.cli.deploy import deploy
from trt_kvcache.cli.doctor import doctor
from trt_kvcache.cli.export import export
from trt_kvcache.cli.flags import with_flags
from trt_kvcache.cli.generate import generate
from trt_kvcache.cli.habits import advice_on_command
from trt_kvcache.cli.inspect import inspect
from trt_kvcache.cli.options import file_flag
from trt_kvcache.cli.output import print_error
from trt_kvcache.cli.plan import plan
from trt_kvcache.cli.plugins import plugins
from trt_kvcache.cli.report import report
from trt_kvcache.cli.rewrite import rewrite
from trt_kvcache.cli.score import score
from trt_kvcache.cli.serve import serve
from trt_kvcache.cli.signals import last_words
from trt_kvcache.cli.verify import verify
from trt_kvcache.cli.worker import worker
from trt_kvcache.errors import OptionError, TrtKvCacheError
from trt_kvcache.files import read_file


class _Commands(TyperGroup):
    """The group of all commands. An error of this package becomes one line; other exceptions keep their trace."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        if args[:1] in (["version"], ["-V"]):
            args = ["--version"]
        elif args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        with _in_one_line():  # typer would end silently, with code 130 for every signal
            return super().make_context(info_name, args, *more, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {name for parameter in self.params for name in parameter.opts}
        if said := advice_on_command(args, {*self.commands, *flags}):
            raise OptionError(said)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with their whole first sentences; the library click would cut long sentences."""
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(command.help or "")) for name, command in named if command])


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
        return
    except TrtKvCacheError as error:
        message, status = error.message, 1
    except OSError as error:
        # Paths that cannot be looked up: too long, or in a folder without permission.
        message, status = f"{os.fspath(error.filename or '')}: {error.strerror}", 1
        if error.filename is None and error.errno == errno.ENOENT and not _has_folder():
            message = "the current folder does not exist any more; change to one that does, or give absolute paths"
        elif error.filename is None or error.errno is None:
            raise
    except KeyboardInterrupt as error:
        message, status = last_words(error)
    print_error(message)
    raise typer.Exit(status)


def _has_folder() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - shorter than Path.cwd
    except FileNotFoundError:
        return False
    return True


app = typer.Typer(
    cls=_Commands,
    context_settings={"help_option_names": ["--help", "-h"], "auto_envvar_prefix": "TRT_KVCACHE"},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables would cut names at 80 columns
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"trt-kvcache {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    options: Annotated[
        Path | None,
        file_flag(
            metavar="FILE", help="TOML file with defaults of options: a table for each command, such as [serve]."
        ),
    ] = None,
) -> None:
    """From an ONNX decoder to a TensorRT engine that updates its KV caches in place.

    Options come from the command line, then from the environment (TRT_KVCACHE_SERVE_CAPACITY is --capacity of serve),
    then from the file of --options.
    """
    if options is not None:
        context.default_map = _options_of(options)


def _options_of(file: Path) -> dict[str, dict[str, Any]]:
    names = [command.__name__ for command in _COMMANDS]
    try:
        tables = tomllib.loads(read_file(file, 1 << 20).decode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"--options {file} cannot be read: {reason}") from None
    for name, table in tables.items():
        if name not in names or not isinstance(table, dict):
            raise OptionError(
                f"--options {file}: {name!r} is no command with options; give [{names[0]}] and lines such as "
                "capacity = 4096 below it"
            )
    return {name: {key.replace("-", "_"): value for key, value in table.items()} for name, table in tables.items()}


_COMMANDS = (
    export, plan, rewrite, build, verify, generate, chat, score, serve, batch, worker, deploy,
    bench, inspect, check, plugins, doctor, report,
)  # fmt: skip
for _command in _COMMANDS:
    app.command(cls=Command)(with_flags(_command))
