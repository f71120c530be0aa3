"""The command line, one file per command. Commands read flags, call the API and print the result.

Heavy modules such as ONNX and NumPy are imported inside the commands, so that ``--help`` and errors answer at once.
"""
