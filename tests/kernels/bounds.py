"""How far apart two ways to compute the same thing may be, and memory around tensors.

Every bound follows from the roundings of the dtype, never from what was once seen.
"""

import torch

# Far more than the widest vector, and odd, so that tensors are aligned to their elements only.
_GUARD = 77


def roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def assert_within(
    found: torch.Tensor, expected: torch.Tensor, error: torch.Tensor | float = 0.0
) -> None:
    """Each element of found is no further than error from its expected one.

    Allowed besides: the rounding of expected to found's dtype. Where expected is not finite, found
    is the same.
    """
    assert found.shape == expected.shape
    rounded = expected.to(found.dtype)
    finite = rounded.isfinite()
    assert torch.equal(found[~finite].nan_to_num(7.0), rounded[~finite].nan_to_num(7.0))
    smallest = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    wide = expected.double()
    allowed = error + wide.abs() * roundoff(found.dtype) + smallest
    excess = (found.double() - wide).abs() - allowed
    worst = torch.where(finite, excess, -1.0).max() if found.numel() else -1.0
    assert worst <= 0, f"{worst} more than the bound"


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy of x in the middle of NaNs, which nothing may read for a result or overwrite."""
    memory = torch.full((x.numel() + 2 * _GUARD,), torch.nan, dtype=x.dtype)
    return memory[_GUARD:-_GUARD].view(x.shape).copy_(x)


def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Guarded memory for a result."""
    return guarded(torch.zeros(shape, dtype=dtype))


def assert_guards_untouched(*tensors: torch.Tensor) -> None:
    """Nothing was written before or behind tensors made by guarded or room."""
    for tensor in tensors:
        memory = tensor._base
        assert memory is not None
        assert memory[:_GUARD].isnan().all()
        assert memory[-_GUARD:].isnan().all()
