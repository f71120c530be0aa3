"""The command line, one file per command. Commands are thin: they read flags, call the API and print the result.

The flags of a command are the fields of dataclasses (`options.with_flags`). Heavy modules such as ONNX and NumPy are
imported inside the handlers, so that ``--help`` and errors answer at once.
"""
