"""Makes steps of a decode loop, in which `check` and `verify` run and compare the original and the rewritten model.

drawn_inputs        defines steps, finds which steps a model allows, and draws values for inputs except caches
cache_contents      values for the caches of a step, also for rows without a token (numbers that must not matter)
original_interface  translates a step of the rewritten model for the original model
probe               evaluates types, shapes and values of tensors in one step, with ONNX's own functions; shapes as
                    products of batch and new tokens
runnable            converts models to operators and types that ONNX Runtime supports
sessions            runs a model on the CPU
"""
