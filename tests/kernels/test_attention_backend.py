"""The choice of the attention kernel: by time, with a warning where a Hopper GPU runs an older kernel."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend

from megatron.kernels import attention
from megatron.kernels import attention_backend as module
from megatron.kernels.attention import repeat_shared_heads, scaled_dot_product_attention
from megatron.kernels.attention_backend import (
    AttentionChoice,
    AttentionShape,
    choose_attention_backend,
    explain_slow_backend,
    measure_backend,
    pick_backend,
    supports_shared_heads,
    use_attention_backend,
)

CPU = torch.device("cpu")
SHAPE = AttentionShape(n_samples=2, n_heads=4, n_kv_heads=2, n_positions=64, d_head=16, causal=True)


def test_the_fastest_backend_that_runs_is_chosen_and_all_times_are_recorded() -> None:
    times = {"cudnn": 2.0, "flash": 3.0, "flash3": 1.5, "efficient": 4.0}
    called = []

    def measure(name: str) -> float:
        called.append(name)
        if name not in times:
            raise ImportError(name)
        return times[name]

    choice = pick_backend("auto", measure)
    assert (choice.name, choice.milliseconds) == ("flash3", times)
    assert "math" not in called  # it stores all scores, and another one runs
    assert choice.describe().startswith("attention: flash3 (fastest measured: cudnn 2.000 ms")
    assert AttentionChoice(**choice.as_dict()) == choice


def test_math_is_the_last_resort_and_a_requested_backend_must_run() -> None:
    def measure(name: str) -> float:
        if name != "math":
            raise RuntimeError(f"No available kernel for {name}\nand a second line")
        return 9.0

    assert pick_backend("auto", measure).name == "math"
    assert pick_backend("math", measure).reason == "dist.attention_backend"
    message = "got cudnn, which does not run here .No available kernel for cudnn.. Remove the key"
    with pytest.raises(ValueError, match=message):
        pick_backend("cudnn", measure)


def test_any_error_excludes_a_backend_but_one_of_cuda_ends_the_run() -> None:
    def measure(name: str) -> float:
        if name == "flash3":
            raise TypeError("an interface of another version")
        if name == "flash4":
            raise errors[-1]
        return 1.0

    errors: list[Exception] = [AssertionError("no kernel for this width")]
    assert set(pick_backend("auto", measure).milliseconds) == {"cudnn", "flash", "efficient"}
    errors.append(RuntimeError("CUDA error: no kernel image is available for execution on the device"))
    assert set(pick_backend("auto", measure).milliseconds) == {"cudnn", "flash", "efficient"}
    with pytest.raises(ValueError, match="got flash3, which does not run here .an interface"):
        pick_backend("flash3", measure)
    errors.append(RuntimeError("CUDA error: an illegal memory access was encountered"))
    for requested in ("auto", "flash4"):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            pick_backend(requested, measure)


def test_the_clock_of_a_gpu_starts_after_the_host_has_a_lead(monkeypatch) -> None:
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            seen.append("record")

        def synchronize(self) -> None:
            seen.append("synchronize")

        def elapsed_time(self, other: object) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("sleep"))
    milliseconds = module._time(lambda: seen.append("run"), torch.device("cuda"))
    calls = ["run"] * module.CALLS
    assert seen == ["sleep", "record", *calls, "record", "synchronize"]
    assert milliseconds == 3.0 / module.CALLS


@pytest.mark.parametrize("name", ["flash", "math"])
def test_backends_of_this_machine_are_measured(name: str) -> None:
    assert 0 < measure_backend(name, SHAPE, torch.float32, CPU) < 1e4


@pytest.mark.parametrize("name", ["cudnn", "flash3", "flash4"])
def test_backends_of_gpus_do_not_run_on_a_cpu(name: str) -> None:
    with pytest.raises((RuntimeError, ImportError, ValueError)):
        measure_backend(name, SHAPE, torch.float32, CPU)


def test_a_cpu_has_its_kernels_and_nothing_is_measured() -> None:
    choice = choose_attention_backend(SHAPE, torch.float32, CPU, "cudnn")
    assert (choice.name, choice.milliseconds, choice.warning) == ("cpu", {}, None)


def test_only_a_hopper_with_an_older_kernel_is_warned_about_with_the_cause() -> None:
    half = torch.bfloat16
    for name in ("cudnn", "flash3", "flash4"):
        assert explain_slow_backend(name, (9, 0), 90000, half) is None
    assert explain_slow_backend("flash", (8, 0), 90000, half) is None
    assert explain_slow_backend("flash", (10, 0), 90000, half) is None
    old = explain_slow_backend("flash", (9, 0), 91002, half)
    assert old is not None and "cuDNN is 91002" in old and "CUDA 13" in old
    new = explain_slow_backend("efficient", (9, 0), 92000, half)
    assert new is not None and "slower or did not run" in new
    wide = explain_slow_backend("efficient", (9, 0), 92000, torch.float32)
    assert wide is not None and "dist.dtype" in wide


def test_a_choice_is_the_first_in_torchs_order_until_the_next_choice() -> None:
    before = module.torch_attention._cur_sdpa_kernel_backends(with_priority=True)
    try:
        use_attention_backend(AttentionChoice("efficient", "", {}))
        order = module.torch_attention._cur_sdpa_kernel_backends(with_priority=True)
        assert order[0] == SDPBackend.EFFICIENT_ATTENTION and SDPBackend.MATH in order
        assert not supports_shared_heads(torch.bfloat16, 64)
        use_attention_backend(AttentionChoice("cudnn", "", {}))
        assert supports_shared_heads(torch.bfloat16, 128)
        assert not supports_shared_heads(torch.float32, 64) and not supports_shared_heads(torch.bfloat16, 256)
    finally:
        use_attention_backend(AttentionChoice("cpu", "", {}))
    assert module.torch_attention._cur_sdpa_kernel_backends(with_priority=True) == before


@pytest.fixture
def no_tag() -> Iterator[None]:
    """The compiler's tag is empty at first, and restored after the test."""
    before = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = ""
    yield
    torch.compiler.config.cache_key_tag = before


@pytest.mark.usefixtures("no_tag")
def test_compiled_code_is_tagged_with_the_backend_behind_the_users_tag(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    tags = []
    for user in ("", "mine"):
        monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", user)
        for name in ("efficient", "cpu"):
            use_attention_backend(AttentionChoice(name, "", {}))
            tags.append(torch.compiler.config.cache_key_tag)
    expected = ["sdpa=efficient,cudnn=91501", "sdpa=cpu,cudnn=91501"]
    assert tags == expected + [f"mine,{tag}" for tag in expected]


@pytest.mark.slow
@pytest.mark.usefixtures("no_tag")
def test_code_compiled_for_a_backend_is_not_loaded_for_another(monkeypatch, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    def attend(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    try:
        for name in ("flash", "flash", "math"):
            torch._dynamo.reset()
            counters.clear()
            use_attention_backend(AttentionChoice(name, "", {}))
            torch.compile(attend)(torch.ones(1, 2, 32, 16))
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    finally:
        use_attention_backend(AttentionChoice("cpu", "", {}))
        torch._dynamo.reset()
    assert hits == [0, 1, 0]


def test_a_dense_mask_excludes_cudnn_and_flash_also_within_one_compiled_graph() -> None:
    operators: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return attention._attend_with_mask(q, q, q, mask, 0.3) * 2

    def attend_as_torch(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=0.3) * 2

    mask = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
    results = {}
    try:
        use_attention_backend(AttentionChoice("cudnn", "", {}))
        before = module.torch_attention._cur_sdpa_kernel_backends(with_priority=True)
        for function in (attend_as_torch, attend):
            torch._dynamo.reset()
            operators.clear()
            q = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
            out = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=record))(q)
            results[function] = out.detach(), torch.autograd.grad(out.square().sum(), q)[0]
            # on a CPU torch's order begins with its flash attention; without it there is the product with k^T
            assert any("flash_attention_for_cpu" in name for name in operators) == (function != attend)
        assert module.torch_attention._cur_sdpa_kernel_backends(with_priority=True) == before
    finally:
        use_attention_backend(AttentionChoice("cpu", "", {}))
        torch._dynamo.reset()
    torch.testing.assert_close(results[attend], results[attend_as_torch], rtol=1e-4, atol=1e-4)
    assert SDPBackend.CUDNN_ATTENTION not in attention.MASKED_BACKENDS


@pytest.mark.parametrize("grad", [True, False])
def test_shared_heads_equal_repeated_ones(grad: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 70, 16, generator=rng) for n in (4, 2, 2))
    with torch.set_grad_enabled(grad):
        shared = scaled_dot_product_attention(q, k, v, True, scale=0.25)
        wide = repeat_shared_heads(q, k, v)
        torch.testing.assert_close(shared, scaled_dot_product_attention(q, *wide, True, scale=0.25))
    assert [x.shape[1] for x in wide] == [4, 4]
    assert torch.equal(wide[0][:, 1], k[:, 0]) and torch.equal(wide[0][:, 2], k[:, 1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_probe_runs_and_every_backend_agrees_with_math() -> None:
    device = torch.device("cuda")
    shape = AttentionShape(n_samples=2, n_heads=8, n_kv_heads=2, n_positions=512, d_head=64, causal=True)
    choice = choose_attention_backend(shape, torch.bfloat16, device)
    assert choice.name in choice.milliseconds and min(choice.milliseconds.values()) > 0
    rng = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(2, n, 512, 64, generator=rng, device=device, dtype=torch.bfloat16) for n in (8, 2, 2)
    )
    results = {}
    try:
        for name in (*choice.milliseconds, "math"):
            use_attention_backend(AttentionChoice(name, "", {}))
            results[name] = scaled_dot_product_attention(q, k, v, True, scale=0.125).float()
    finally:
        use_attention_backend(AttentionChoice("cpu", "", {}))
    for result in results.values():
        torch.testing.assert_close(result, results["math"], rtol=2e-2, atol=2e-2)
