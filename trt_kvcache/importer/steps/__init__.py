"""Steps of a decode loop for the original and the rewritten model; `check` and `verify` run both models with these.

schedule   steps, and the limits that a model sets them
inputs     values for the inputs of a step; the role of each decides
contents   values for its caches, with garbage in rows without a token
original   translates a step of the rewritten model for the original
runnable   models in operators and types that ONNX Runtime supports
sessions   run a model on the CPU
"""
