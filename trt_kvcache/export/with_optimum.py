"""Runs optimum-onnx on a checkpoint, in an interpreter that has it: ``python with_optimum.py CHECKPOINT FOLDER``.

optimum-onnx needs transformers below 4.58. These versions ignore ``rope_parameters``, in which transformers 5 stores
the base of rotary embeddings. So optimum-onnx would silently export a model with another base.
"""

import json
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Export the checkpoint that the command line names; or print the reason to stderr and exit."""
    checkpoint, folder = sys.argv[1:]
    config = json.loads(Path(checkpoint, "config.json").read_text(encoding="utf-8"))
    version = import_module("transformers").__version__
    if int(version.split(".")[0]) < 5 and "rope_parameters" in config and "rope_theta" not in config:
        sys.exit(
            f"config.json is of transformers 5, and the installed {version} does not read its rope_parameters: rotary "
            "embeddings would have another base; use another exporter, or add rope_theta and rope_scaling to it"
        )
    export = import_module("optimum.exporters.onnx").main_export
    export(checkpoint, folder, task="text-generation-with-past", no_post_process=True, do_validation=False)


if __name__ == "__main__":
    main()
