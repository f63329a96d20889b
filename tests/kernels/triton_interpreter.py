"""Triton's interpreter, for kernels on a CPU: made to round as a GPU does, and to run with any numpy.

Imported while tests are collected, for Triton's own functions are interpreted only if it is first imported so. Afterwards nothing
else of the process notices: ops choose as they would without. Kernels are interpreted where there is no GPU only.

A kernel may read and write only the tensors of its launch (of a view, only its part), as in compute-sanitizer's memcheck, which however misses
an access from one tensor into the next.

The interpreter's faults (Triton 3.6): f32 becomes bf16 by cutting, products of bf16 are those of its bits, and a number of one
element is no index for numpy from 2.4 on. Triton 3.9 needs masks of bool, and a comparison of numbers is none.
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

for path in sorted(Path(pyspec.cuda.ops.__file__).parent.glob("*/*triton_kernels.py")):
    importlib.import_module(f"pyspec.cuda.ops.{path.parent.name}.{path.stem}")
del os.environ["TRITON_INTERPRET"]

_load = interpreter.InterpreterBuilder.create_masked_load
_store = interpreter.InterpreterBuilder.create_masked_store
_cas = interpreter.InterpreterBuilder.create_atomic_cas
_rmw = interpreter.InterpreterBuilder.create_atomic_rmw
_cast, _dot = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot
_patch = interpreter._patch_lang_tensor


def _wide(x):
    return (x.data.astype(np.uint32) << 16).view(np.float32)


def _cast_impl(self, src, dst_type):
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return interpreter.TensorHandle(
            np.where(np.isnan(src.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16
        )
    return _cast(self, src, dst_type)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    if a.dtype.scalar == tl.bfloat16:
        return interpreter.TensorHandle(np.matmul(_wide(a), _wide(b)) + d.data, d.dtype.scalar)
    if a.dtype.scalar in (
        tl.float16,
        tl.float32,
    ):  # numpy's order of additions hangs on the shape, a GPU's does not
        exact = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(exact.astype(np.float32), d.dtype.scalar)
    return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)


class _Given:
    """The memory of the launch that runs: where each stretch of it begins, and ends."""

    begins = ends = np.zeros(0, np.uint64)

    def take(self, args) -> None:
        spans = sorted(_span(t) for t in args if isinstance(t, torch.Tensor) and t.numel())
        merged: list[list[int]] = []
        for begin, end in spans:
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self.begins, self.ends = (np.array([m[i] for m in merged], np.uint64) for i in (0, 1))

    def check(self, ptrs, mask, what: str) -> None:
        """IndexError if an element that is not masked lies elsewhere."""
        at = np.broadcast_to(ptrs.data, np.broadcast_shapes(ptrs.data.shape, mask.shape))
        at = at[np.broadcast_to(mask, at.shape)].astype(np.uint64)
        if not at.size:
            return
        size = np.uint64(interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize)
        i = np.searchsorted(self.begins, at, side="right") - 1
        if (i < 0).any() or (at + size > self.ends[i]).any():
            n = int(((i < 0) | (at + size > self.ends[np.maximum(i, 0)])).sum())
            raise IndexError(f"{what} of {n} of {at.size} elements outside of what the launch was given")


def _span(t: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


_given = _Given()


def _masked_load(self, ptrs, mask, *rest):
    mask = mask.data.astype(bool)
    _given.check(ptrs, mask, "a read")
    return _load(self, ptrs, interpreter.TensorHandle(mask, tl.int1), *rest)


def _masked_store(self, ptrs, value, mask, *rest):
    mask = mask.data.astype(bool)
    _given.check(ptrs, mask, "a write")
    return _store(self, ptrs, value, interpreter.TensorHandle(mask, tl.int1), *rest)


def _atomic_cas(self, ptr, *rest):
    _given.check(ptr, np.ones_like(ptr.data, bool), "an atomic")
    return _cas(self, ptr, *rest)


def _atomic_rmw(self, how, ptr, value, mask, *rest):
    _given.check(ptr, mask.data.astype(bool), "an atomic")
    return _rmw(self, how, ptr, value, mask, *rest)


_run = interpreter.GridExecutor.__call__


def _run_with(self, *args, **named):
    _given.take([*args, *named.values()])
    return _run(self, *args, **named)


def _patch_lang_tensor(tensor, scope):
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))


interpreter.GridExecutor.__call__ = _run_with
interpreter.InterpreterBuilder.create_atomic_cas = _atomic_cas
interpreter.InterpreterBuilder.create_atomic_rmw = _atomic_rmw
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
    setattr(
        interpreter.InterpreterBuilder, _name, lambda self, src, dst_type: self.cast_impl(src, dst_type)
    )
