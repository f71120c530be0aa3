"""Edits a model into canonical form: TensorScatter nodes update caches, and Attention nodes read them.

canonical_nodes    emits the nodes of the canonical form, with masks and biases
computed_keys      emits keys and values that are computed from caches
past_lengths       replaces positions, and other tensors that depend on the length of the past
ring_windows       makes caches of windowed attention circular
"""
