"""The template op on every back end that a machine without a GPU has; tests/gpu/test_null.py goes
on with a GPU.
"""

from __future__ import annotations

import pytest
import torch

from mose_fast import _loader
from mose_fast.ops.null import null
from mose_fast.reference.null import null as reference

needs_library = pytest.mark.skipif(_loader.native is None, reason="the native library was not built")

INPUTS = {
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0, 3),
    "odd": lambda: torch.arange(7, dtype=torch.float32),
    "larger than a chunk": lambda: torch.arange(2**19 + 3, dtype=torch.float32),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "sliced": lambda: torch.arange(40, dtype=torch.int64).reshape(8, 5)[1::3, ::2],
    "expanded": lambda: torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "uint8": lambda: torch.arange(256, dtype=torch.uint8),
    "bfloat16": lambda: torch.randn(9).bfloat16(),
    "bool": lambda: torch.tensor([True, False]),
}


@pytest.fixture(params=[pytest.param("native", marks=needs_library), "fallback"])
def op(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(_loader, "native", None)
    return null


@pytest.mark.parametrize("name", INPUTS)
def test_copies_and_leaves_its_input_alone(op, name):
    x = INPUTS[name]()
    before = x.clone()
    y = op(x)
    assert torch.equal(y, before) and torch.equal(x, before)
    assert (y.dtype, y.shape, y.is_contiguous()) == (x.dtype, x.shape, True)
    assert y.numel() == 0 or y.data_ptr() != x.data_ptr()


@needs_library
@pytest.mark.parametrize("name", INPUTS)
def test_native_equals_the_reference(name):
    x = INPUTS[name]()
    native, wanted = _loader.native.null(x), reference(x)
    assert torch.equal(native, wanted)
    assert native.stride() == wanted.stride()


@pytest.mark.parametrize("shape", [(3, 2), (0, 2), (1,)])
def test_first_and_second_derivative(op, shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,))
    assert torch.autograd.gradgradcheck(op, (x,))


@pytest.mark.parametrize("layout", ["of a sum", "transposed", "sliced"])
def test_gradients_of_any_layout(op, layout):
    x = torch.randn(3, 3, requires_grad=True)
    weights = torch.arange(9.0).reshape(3, 3)
    y = op(x)
    if layout == "of a sum":  # reaches backward with strides of zero
        y.sum().backward()
        wanted = torch.ones(3, 3)
    elif layout == "transposed":
        (y.T * weights).sum().backward()
        wanted = weights.T
    else:
        torch.cat([y, x.detach()])[:3].backward(weights)
        wanted = weights
    assert torch.equal(x.grad, wanted)


@needs_library
@pytest.mark.parametrize("name", ["odd", "transposed", "channels last", "empty"])
def test_opcheck(name):
    x = INPUTS[name]().requires_grad_()
    results = torch.library.opcheck(torch.ops.mose_fast.null.default, (x,))
    assert set(results.values()) == {"SUCCESS"}


@needs_library
def test_compiles_without_a_graph_break():
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.compile(null, fullgraph=True, backend="aot_eager")(x)
    y.backward(torch.full_like(y, 2.0))
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


@needs_library
def test_a_device_that_the_library_has_no_code_for():
    x = torch.zeros(2, device="meta")
    with pytest.raises(NotImplementedError, match="x is on meta; this build of mose_fast serves cpu"):
        _loader.native.null(x)
    assert null(x).device.type == "meta"  # the public function falls back


@pytest.mark.parametrize("x", [None, 1.0, [1, 2]])
def test_refuses_what_is_no_tensor(x):
    with pytest.raises(TypeError, match=r"x is .*; wanted a torch\.Tensor"):
        null(x)
