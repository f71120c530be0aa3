"""Steps of a decode loop for the original and the rewritten model; `check` and `verify` run both models with these.

drawn_inputs        steps, the limits that a model sets them, and values for their inputs; roles decide them
cache_contents      values for its caches, with garbage in rows without a token
original_interface  translates a step of the rewritten model for the original
later_tokens        models whose tokens see later tokens of their step
probe               types, shapes and values of tensors in one step, by ONNX's own means
runnable            models in operators and types that ONNX Runtime supports
element_types       element types that a model declares
sessions            run a model on the CPU
"""
