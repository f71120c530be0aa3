"""The commands' base class: formats help for 80 columns, and explains flags of other tools."""

from __future__ import annotations

import re
import sys
from typing import Any

from typer.core import TyperCommand

from trt_kvcache.cli.habits import advice_on_address, advice_on_flags, advice_on_more, translated
from trt_kvcache.errors import OptionError

_HELP_ALL = "--help-all"
PLANNED = "How the model is planned"
"""Title of the group of planning flags, which most commands have."""


class Command(TyperCommand):
    """A command whose help has one section for each group of flags, and never cuts names.

    On a terminal it shows the progress of long work, unless it prints JSON.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if ctx.params.get("json") or not sys.stderr.isatty():
            return super().invoke(ctx)
        from trt_kvcache.cli.progress_bars import show_progress

        with show_progress():
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help on the command's flags. Planning flags, which most commands have, come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "option":
                vars(parameter)["show_envvar"] = False  # the root command's help explains these names once
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None)
                kind = "Options" if parameter.param_type_name == "option" else "Arguments"
                sections.setdefault(panel or kind, []).append(record)
        whole = _HELP_ALL in ctx.meta or self.name == "plan"
        for title, rows in sorted(sections.items(), key=lambda section: section[0] == PLANNED):
            with formatter.section(title):
                if title != PLANNED or whole:
                    formatter.write_dl(rows)
                else:
                    formatter.write_text(
                        f"{len(rows)} options of trt-kvcache plan, such as --capacity; {_HELP_ALL} shows them"
                    )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command's arguments; raise `OptionError` for a flag of another tool, or a number like ``4k``."""
        if _HELP_ALL in args:
            ctx.meta[_HELP_ALL] = True
            args = ["--help"]
        typed = list(args)
        own = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        names = {str(parameter.name) for parameter in self.params if parameter.param_type_name == "option"}
        if unknown := sorted({*(ctx.default_map or {})} - names):  # of the file `--options`
            raise OptionError(
                f"--options: {self.name} has no option {unknown[0]!r}; its options: "
                f"{', '.join(sorted(name.replace('_', '-') for name in names - {'help'}))}"
            )
        if said := advice_on_address(args):
            raise OptionError(said)
        try:
            return super().parse_args(ctx, translated(args))
        except Exception as error:
            why = getattr(error, "format_message", lambda: "")()
            said = advice_on_flags(typed, own) or advice_on_more(str(self.name), typed, why)
            if why and said:
                raise OptionError(said) from None
            if why:  # the type's own words alone
                error.message = error.message.replace("Value error, ", "")  # type: ignore[attr-defined]
            raise


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text, on one line, without its full stop."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?: |$)", paragraph)[0]
