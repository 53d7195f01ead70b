"""Makes Triton's interpreter several times faster, and sums its float32 products in float64.

A kernel of small blocks spends its time on the interpreter's own objects, not on numbers.
"""

import dataclasses

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def install():
    patch_once_a_kernel()
    skip_unread_checks()
    remember_types()
    round_products_once()


def patch_once_a_kernel():
    """The interpreter patches triton.language at each call of a function within a kernel. The
    patches are the same until the kernel ends."""
    patch, done = interpreter._patch_lang, {}

    def patch_once(fn):
        modules = frozenset(name for name in ("tl", "core") if name in fn.__globals__)
        if modules not in done:
            scope = done[modules] = patch(fn)
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return done[modules]

    interpreter._patch_lang = patch_once


def skip_unread_checks():
    """Sums of integers are computed again in int64, for an assertion that debug=False drops."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remember_types():
    """Caches block types, tensor shapes and NumPy types: few different ones occur in a kernel."""
    new_type, new_tensor, equal = (
        core.block_type.__init__,
        core.tensor.__init__,
        core.tuple.__eq__,
    )
    new_numpy_type = interpreter._get_np_dtype
    types, shapes, numpy_types = {}, {}, {}

    def block_type(self, element_ty, shape):
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        if not isinstance(sizes, (list, tuple)):
            return new_type(self, element_ty, shape)
        key = element_ty.name, *[s.value if type(s) is core.constexpr else s for s in sizes]
        if key in types:
            vars(self).update(types[key], element_ty=element_ty)
        else:
            new_type(self, element_ty, shape)
            types[key] = dict(vars(self))

    def tensor(self, handle, type):
        key = type.name if type.is_block() else None
        if key not in shapes:
            new_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def numpy_type(dtype):
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = new_numpy_type(dtype)
        return numpy_types[dtype.name]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.tuple.__eq__ = lambda self, other: (
        core.constexpr(True) if self is other else equal(self, other)
    )
    interpreter._get_np_dtype = numpy_type


def round_products_once():
    """Sums float32 products in float64.

    A GPU adds up one element's products in the same order if both operands change places. numpy
    does not on every CPU: attention's backward then finds other scores than its forward did.
    """
    dot = interpreter.InterpreterBuilder.create_dot

    def rounded_once(self, a, b, d, *options):
        if a.data.dtype != np.float32:
            return dot(self, a, b, d, *options)
        total = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(total.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = rounded_once
