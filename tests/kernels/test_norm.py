"""CPU RMSNorm against torch in float64, and the cases in which it is not used."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron import _csrc
from megatron.kernels.norm import can_use_cpu_rms_norm, cpu_rms_norm, rms_norm

SHAPES = [(512, 12), (32, 16, 2, 6), (3, 7), (4, 128, 80), (1000, 513), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_result_and_gradients_match_float64(shape: tuple[int, ...], size: float) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = (torch.randn(*shape, generator=generator) * size).requires_grad_()
    gain = torch.randn(shape[-1], generator=generator).requires_grad_()
    grad = torch.randn(*shape, generator=generator)
    y = cpu_rms_norm(x, gain, 1e-5)
    y.backward(grad)
    exact_x, exact_gain = (of.detach().double().requires_grad_() for of in (x, gain))
    exact = F.rms_norm(exact_x, exact_gain.shape, exact_gain, 1e-5)
    exact.backward(grad.double())
    for ours, theirs in ((y, exact), (gain.grad, exact_gain.grad)):
        largest = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-6 * largest)
    if shape[-1] > 1:  # with one element x / |x| is constant: the gradient is 0 except for eps
        off = float((x.grad.double() - exact_x.grad).abs().max())
        assert off <= 1e-6 * float(grad.abs().max() * gain.detach().abs().max()) / size * 3


def test_strided_inputs_and_strided_gradients_are_supported() -> None:
    x = torch.randn(4, 16, 2, 6).transpose(1, 2).requires_grad_()
    gain = torch.ones(6, requires_grad=True)
    cpu_rms_norm(x, gain, 1e-5).transpose(1, 2).flatten(2).square().sum().backward()
    exact = x.detach().double().requires_grad_()
    F.rms_norm(exact, (6,), None, 1e-5).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_the_gradient_does_not_depend_on_the_threads() -> None:
    rng = np.random.default_rng(0)
    x, grad = (rng.standard_normal((70_000, 16)).astype(np.float32) for _ in range(2))
    gain = np.ones(16, np.float32)
    gradients = []
    for n_threads in (1, 2, 3):
        out, inverse = np.empty_like(x), np.empty(len(x), np.float32)
        _csrc.rms_norm(x, gain, 1e-5, out, inverse, n_threads)
        grad_x, grad_gain = np.empty_like(x), np.empty_like(gain)
        _csrc.rms_norm_backward(x, gain, inverse, grad, grad_x, grad_gain, n_threads)
        gradients.append((grad_x, grad_gain))
    for grad_x, grad_gain in gradients[1:]:
        assert np.array_equal(grad_x, gradients[0][0]) and np.array_equal(grad_gain, gradients[0][1])
    expected = (x.astype(np.float64) * inverse[:, None] * grad).sum(0)
    np.testing.assert_allclose(gradients[0][1], expected, rtol=1e-4)


def test_a_nan_row_stays_nan_and_no_other_does() -> None:
    x = torch.ones(3, 8)
    x[1, 2] = torch.nan
    assert cpu_rms_norm(x, torch.ones(8), 1e-5).isnan().any(1).tolist() == [False, True, False]


def test_other_dtypes_devices_and_empty_tensors_use_torch() -> None:
    gain = torch.ones(8)
    assert can_use_cpu_rms_norm(torch.ones(2, 8), torch.nn.Parameter(gain))
    assert not can_use_cpu_rms_norm(torch.ones(2, 8, dtype=torch.float64), gain)
    assert not can_use_cpu_rms_norm(torch.ones(2, 8, device="meta"), gain)
    assert rms_norm(torch.ones(0, 8), gain, 1e-5).shape == (0, 8)


def test_double_backward_is_refused() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradient"):
        torch.autograd.grad(cpu_rms_norm(x, torch.ones(8), 1e-5).sum(), x, create_graph=True)


def test_the_kernel_refuses_arrays_of_other_shapes() -> None:
    x, gain, rows = np.ones((3, 8), np.float32), np.ones(8, np.float32), np.ones(3, np.float32)
    for shorter in (gain[:7].copy(), gain[:0].copy()):
        with pytest.raises(ValueError, match="wrong shapes"):
            _csrc.rms_norm(x, shorter, 1e-5, np.empty_like(x), rows, 1)
    with pytest.raises(ValueError, match="wrong shapes"):
        _csrc.rms_norm_backward(x, gain, rows, x[:2].copy(), np.empty_like(x), np.empty_like(gain), 1)
    with pytest.raises(TypeError):
        _csrc.rms_norm(x.astype(np.float64), gain, 1e-5, np.empty_like(x), rows, 1)
