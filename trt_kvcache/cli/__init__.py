"""The command line, one file per command. Commands are thin: they read options, call the API, print what it returns.

Nothing heavy is imported here or at the top of a command's file, so that ``--help`` answers at once: ONNX, numpy and
TensorRT come with the API, inside the handlers.
"""
