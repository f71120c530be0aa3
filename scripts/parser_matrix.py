"""What TensorRT's own parser makes of exports as they are: refused, right, or silently wrong.

    python scripts/parser_matrix.py [MODEL.onnx ...]    print it: of these models, or of the stored exports
    python scripts/parser_matrix.py --write             put the results of the stored exports into docs/support.md

Networks run in NumPy, beside the models in ONNX Runtime, as by `trt-kvcache verify MODEL --as-exported`.
Needs TensorRT for RTX.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from readme_block import replace_block

ROOT = Path(__file__).resolve().parent.parent
PAGE, MODELS = ROOT / "docs" / "support.md", ROOT / "tests" / "models"
BEGIN, END = "<!-- exports:begin -->", "<!-- exports:end -->"


def verdict(model: Path) -> tuple[str, str]:
    """Return the result, such as "refused", and the parser's message or the difference."""
    from trt_kvcache.cli.verify import parsed_as_exported
    from trt_kvcache.errors import OptionError, TrtKvCacheError
    from trt_kvcache.importer.cache_plan import PlanOptions

    try:
        try:
            text = parsed_as_exported(model, PlanOptions(capacity=64))
        except OptionError:
            text = parsed_as_exported(model, PlanOptions())
    except TrtKvCacheError as error:
        return "not judged", f"refused here, too: {error.message}"
    text = text.replace(f"{model}: ", "")
    if text.startswith("refused"):
        first = text.split("; ")[0].rsplit(" (", 1)[-1].replace("): ", ": ", 1)
        return ("refused" if "cannot parse" in text else "the parser dies", first.replace("Assertion failed: ", ""))
    if "WRONG" in text:
        return "silently wrong", text.split("WRONG: ")[1]
    if found := re.search(r"right within (\S+);", text):
        return "right, copies its caches", f"within {found[1]}"
    return "not judged", text.split("; ", 1)[1]


def matrix(models: list[Path], root: Path) -> str:
    rows = [(model.parent.relative_to(root).as_posix(), *verdict(model)) for model in models]
    counts = Counter(word for _, word, _ in rows)
    lines = ["", ", ".join(f"{word}: {count}" for word, count in counts.most_common()) + ".", ""]
    lines += ["| export | TensorRT's parser | |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {word} | {why[:140].replace('|', '')} |" for name, word, why in rows]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="update docs/support.md")
    given = parser.parse_args()
    models = given.models or sorted(MODELS.glob("*/*/model.onnx"))
    table = matrix(models, Path("/") if given.models else MODELS)
    if given.write:
        text = replace_block(PAGE.read_text(encoding="utf-8"), BEGIN, END, table)
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(table)


if __name__ == "__main__":
    main()
