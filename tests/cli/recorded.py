"""A command whose bars are drawn at each change, not ten times a second, so that a recording has all of them."""

from typing import Any

from rich.progress import Progress

from trt_kvcache.__main__ import main

update = Progress.update


def drawn(self: Progress, *given: Any, **named: Any) -> None:
    update(self, *given, **named)
    self.refresh()


if __name__ == "__main__":
    Progress.update = drawn  # type: ignore[method-assign]
    main()
