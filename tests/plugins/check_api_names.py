"""Runs with the real bindings (see real_bindings.py): prints the problems of the uses that it is given."""

from __future__ import annotations

import json
import sys

import tensorrt as trt
import tensorrt.plugin

sys.path.insert(0, __file__.rpartition("/")[0])
from api_names import Use, problem

answers = [[use, problem(trt, Use(*use))] for use in json.load(sys.stdin)]
assert tensorrt.plugin
sys.stdout.write(json.dumps({"version": trt.__version__, "answers": answers}) + "\n")
