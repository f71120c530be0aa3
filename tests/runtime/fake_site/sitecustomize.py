"""The fake GPU for every Python process that has this folder on its path: those that `scripts/gpu_check` starts."""

import runtime.fake_gpu  # noqa: F401
