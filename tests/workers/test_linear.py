"""Which kernel multiplies; products with weights of a type that the CPU lacks are those of f32, rounded once."""

from __future__ import annotations

import pytest
import torch

from halfmoon.workers.model import linear
from halfmoon.workers.model.kernels.code import KernelUnavailable
from halfmoon.workers.model.linear import Linear

Tensor = torch.Tensor

NARROW = [torch.bfloat16, torch.float16]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture
def multiplies_f32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "multiplies", lambda dtype: dtype == torch.float32)


@pytest.mark.usefixtures("multiplies_f32_alone")
@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_product_of_a_type_that_the_cpu_lacks_is_that_of_f32_rounded_once(
    dtype: torch.dtype, with_bias: bool, rows: int
) -> None:
    weight, x = drawn(96, 64, dtype=dtype), drawn(rows, 64, dtype=dtype)
    bias = drawn(96, dtype=dtype) if with_bias else None
    in_f32 = Linear(weight.float(), None if bias is None else bias.float())
    found = Linear(weight, bias)
    assert found.kernel == "rows"
    assert torch.equal(found(x), in_f32(x.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_a_product_is_near_that_of_f64(dtype: torch.dtype) -> None:
    weight, x, bias = drawn(96, 64, dtype=dtype), drawn(8, 64, dtype=dtype), drawn(96, dtype=dtype)
    exact = x.double() @ weight.double().T + bias.double()
    found = Linear(weight, bias)(x)
    assert found.dtype == dtype
    # A result is rounded to its type, and so may be what is under way to it.
    torch.testing.assert_close(
        found.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("missing", [AttributeError, RuntimeError])
def test_a_torch_that_cannot_say_what_it_multiplies_is_left_to_its_own_products(
    missing: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Operators:
        def __getattr__(self, name: str) -> object:
            raise missing(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Operators())
    assert linear.multiplies(torch.bfloat16)
    product = Linear(drawn(96, 64, dtype=torch.bfloat16))
    assert product.kernel == "plain"
    x = drawn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(product(x), torch.nn.functional.linear(x, drawn(96, 64, dtype=torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_row_kernel_libraries_multiply_and_it_is_said_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = f"no kernel of {dtype} for this test"

    def unavailable(*_: object) -> None:
        raise KernelUnavailable(reason)

    monkeypatch.setattr(linear, "PackedRows", unavailable)
    monkeypatch.setattr(linear, "multiplies", lambda kind: kind == torch.float32)
    weight, x = drawn(96, 64, dtype=dtype), drawn(3, 64, dtype=dtype)
    products = [Linear(weight), Linear(weight)]
    for product in products:
        assert product.kernel == ("onednn" if dtype == torch.float32 else "plain")
        torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight))
    assert [record.getMessage() for record in caplog.records] == [
        f"products of a step are slower than they could be: {reason}"
    ]
