"""Which kernel multiplies, and to which type it rounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from halfmoon.workers.model import linear
from halfmoon.workers.model.kernels.code import KernelUnavailable
from halfmoon.workers.model.kernels.products import PackedRows
from halfmoon.workers.model.linear import Linear

Tensor = torch.Tensor

NARROW = [torch.bfloat16, torch.float16]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


AVX2: dict[str, bool] = {}
AVX512 = {"avx512f": True}
AMX = {"avx512f": True, "avx512bf16": True, "amx-bf16": True}


@pytest.mark.parametrize(
    ("features", "in_onednn", "faster"),
    [
        (AVX2, [], []),
        (AVX512, [torch.bfloat16], []),
        (AMX, [torch.bfloat16], [torch.bfloat16]),
        (AVX512, NARROW, [torch.float16]),
    ],
    ids=["AVX2", "AVX-512", "AMX", "AVX512-FP16"],
)
def test_libraries_multiply_where_they_have_instructions_that_the_row_kernel_lacks(
    features: dict[str, bool],
    in_onednn: list[torch.dtype],
    faster: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "multiplies", lambda dtype: dtype in [torch.float32, *in_onednn])
    monkeypatch.setattr(linear, "llvm", SimpleNamespace(get_host_cpu_features=lambda: features))
    made = {dtype: Linear(drawn(96, 64, dtype=dtype)).kernel for dtype in (torch.float32, *NARROW)}
    assert [dtype for dtype, kernel in made.items() if kernel != "rows"] == faster


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_product_of_a_narrow_type_is_rounded_once_or_not_at_all(
    dtype: torch.dtype, with_bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_faster_by_libraries", lambda dtype: False)
    weight, x = drawn(96, 64, dtype=dtype), drawn(rows, 64, dtype=dtype)
    bias = drawn(96, dtype=dtype) if with_bias else None
    in_f32 = PackedRows(weight, bias)(x)
    found = Linear(weight, bias)
    assert found.kernel == "rows"
    assert torch.equal(found(x), in_f32.to(dtype))
    assert torch.equal(found(x, torch.float32), in_f32)


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
    monkeypatch.setattr(linear, "llvm", SimpleNamespace(get_host_cpu_features=lambda: AMX))
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
