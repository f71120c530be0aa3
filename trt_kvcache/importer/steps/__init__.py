"""One step of a decode, whichever model takes it: what `check` and `verify` run both models with.

schedule   steps, and the limits that a model sets them
inputs     values for the inputs of a step; the role of each decides
contents   values for its caches, with garbage in rows without a token
original   a step of the rewritten model as the original takes it
runnable   models in operators and types that ONNX Runtime has
sessions   what runs a model on the CPU
"""
