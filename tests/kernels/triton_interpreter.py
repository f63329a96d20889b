"""Triton's interpreter, for kernels on a CPU: made to round as a GPU does, and to run with any numpy.

Imported while tests are collected, for Triton's own functions are interpreted only if it is first imported so. Afterwards nothing
else of the process notices: ops choose as they would without. Kernels are interpreted where there is no GPU only.

What the interpreter lacks (Triton 3.6): f32 becomes bf16 by cutting, products of bf16 are those of its bits, and a number of one
element is no index for numpy from 2.4 on. Triton 3.9 wants masks of bool, where a comparison of numbers is none.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

import pyspec.cuda.ops

if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU here", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if "triton" in sys.modules:
    pytest.skip("triton was imported to compile, not to interpret", allow_module_level=True)

os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
import triton.experimental.gluon  # noqa: F401 - the first launch would
import triton.language as tl
from triton.runtime import interpreter

for path in sorted(Path(pyspec.cuda.ops.__file__).parent.glob("*/triton_kernels.py")):
    importlib.import_module(f"pyspec.cuda.ops.{path.parent.name}.triton_kernels")
del os.environ["TRITON_INTERPRET"]

_load, _store = (
    interpreter.InterpreterBuilder.create_masked_load,
    interpreter.InterpreterBuilder.create_masked_store,
)
_cast, _dot, _patch = (
    interpreter.InterpreterBuilder.cast_impl,
    interpreter.InterpreterBuilder.create_dot,
    interpreter._patch_lang_tensor,
)


def _wide(x):
    return (x.data.astype(np.uint32) << 16).view(np.float32)


def _cast_impl(self, src, dst_type):
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return interpreter.TensorHandle(np.where(np.isnan(src.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)
    return _cast(self, src, dst_type)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    if a.dtype.scalar == tl.bfloat16:
        return interpreter.TensorHandle(np.matmul(_wide(a), _wide(b)) + d.data, d.dtype.scalar)
    if a.dtype.scalar == tl.float16:  # numpy's order of additions hangs on the shape, a GPU's does not
        exact = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(exact.astype(np.float32), d.dtype.scalar)
    return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)


def _masked_load(self, ptrs, mask, *rest):
    return _load(self, ptrs, interpreter.TensorHandle(mask.data.astype(bool), tl.int1), *rest)


def _masked_store(self, ptrs, value, mask, *rest):
    return _store(self, ptrs, value, interpreter.TensorHandle(mask.data.astype(bool), tl.int1), *rest)


def _patch_lang_tensor(tensor, scope):
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))


interpreter.InterpreterBuilder.cast_impl = _cast_impl
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.create_masked_load = _masked_load
interpreter.InterpreterBuilder.create_masked_store = _masked_store
interpreter._patch_lang_tensor = _patch_lang_tensor
for _name in (
    "create_si_to_fp",
    "create_ui_to_fp",
    "create_fp_to_si",
    "create_fp_to_ui",
    "create_fp_ext",
    "create_fp_trunc",
):
    setattr(interpreter.InterpreterBuilder, _name, lambda self, src, dst_type: self.cast_impl(src, dst_type))
