"""Makes steps of a decode loop, with all inputs, in which `check` and `verify` run both models.

drawn_inputs        steps, the limits of a model for steps, and values for the inputs of a step
cache_contents      values for the caches of a step, with garbage in rows without a token
original_interface  translates a step of the rewritten model for the original model
later_tokens        finds models whose tokens see later tokens of their step
probe               evaluates types, shapes and values of tensors in one step, with ONNX's own functions
runnable            converts models to operators and types that ONNX Runtime supports
element_types       finds and replaces the element types that a model declares
sessions            runs a model on the CPU
"""
