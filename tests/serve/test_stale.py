"""Values that do not follow the weights of a swap: they are refused, or the `Live` and its reports list them."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

import modelstate as ms
from modelstate.errors import CanaryError, LiveTargetError
from tests.serve.models import linear, weights_of

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Pair(nn.Module):
    def __init__(self, k: float) -> None:
        super().__init__()
        self.a, self.b = linear(k), linear(k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(torch.relu(self.a(x)))
        return y


class Computed(Pair):
    """Keeps a value that its constructor computes from a weight."""

    kept: Any

    def __init__(self, k: float, compute: Callable[[nn.Module], Any]) -> None:
        super().__init__(k)
        self.kept = compute(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.as_tensor(self.kept)


def copied(module: Any) -> Any:
    return module.a.weight.detach().t().contiguous()


@pytest.mark.parametrize(
    "compute", [copied, lambda module: copied(module).numpy(), lambda module: nn.Parameter(copied(module))]
)
@pytest.mark.parametrize("backend", ["", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_values_outside_of_the_state_are_listed(compute: Callable[[Any], Any], backend: str) -> None:
    module = Computed(1, lambda _: None)
    object.__setattr__(module, "kept", compute(module))
    module.eval()
    live = ms.Live(torch.compile(module, backend=backend) if backend else module)
    assert live.fixed == ("kept",)
    report = live.swap(Pair(2).state_dict())
    assert any("not in the state, so not changed; stale where" in note and "kept" in note for note in report.notes)
    with pytest.raises(CanaryError, match="differs too much"):
        live.swap(Pair(2).state_dict(), canary=ms.Canary((X,), expected=X @ copied(Pair(2)), atol=0.01))


def test_values_in_containers_closures_and_unregistered_modules_are_listed() -> None:
    module = Pair(1).eval()
    weight = copied(module)
    object.__setattr__(module, "kept", [{"x": copied(module)}, linear(1)])
    object.__setattr__(module, "call", lambda x: x @ weight)
    live = ms.Live(module)
    assert set(live.fixed) == {"call: weight", "kept[0]['x']", "kept[1].weight", "kept[1].bias"}


def test_constants_of_an_exported_program_are_listed() -> None:
    program = torch.export.export(Computed(1, copied).eval(), (X,))
    live = ms.Live(program)
    assert live.fixed == ("kept",)
    assert any("kept" in note for note in live.swap(Pair(2).state_dict()).notes)
    module = torch.export.export(Pair(1).eval(), (X,)).module()
    with pytest.raises(LiveTargetError, match=r"to do: serve the ExportedProgram itself; training=True"):
        ms.Live(module)
    live = ms.Live(module, training=True)
    live.swap(Pair(2).state_dict())
    assert torch.allclose(live(X), Pair(2)(X))


@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight.numpy(),
        lambda weight: weight.numpy()[1:],
        lambda weight: torch.from_numpy(weight.numpy()),
        lambda weight: torch.from_dlpack(weight),
    ],
)
def test_views_of_a_weight_under_another_storage_are_refused(view: Callable[[torch.Tensor], Any]) -> None:
    module = Computed(1, lambda module: view(module.a.weight.detach()))  # type: ignore[attr-defined]
    with pytest.raises(LiveTargetError, match=r"kept is a view of a\.weight"):
        ms.Live(module.eval())


class Caching(Pair):
    """Has a buffer that the first request computes from a weight."""

    transposed: torch.Tensor | None

    def __init__(self, k: float) -> None:
        super().__init__(k)
        self.register_buffer("transposed", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.transposed is None:
            self.transposed = copied(self)
        return x @ self.transposed


def test_a_canary_tries_the_buffers_that_are_carried_over() -> None:
    live = ms.Live(Caching(1).eval())
    live(X)
    canary = ms.Canary((X,), expected=X @ copied(Pair(2)), atol=0.01)
    with pytest.raises(CanaryError, match="differs too much"):
        live.swap(Pair(2).state_dict(), canary=canary)
    assert live.swap(Pair(2).state_dict(), canary=canary, buffers="reset").version == 2
    assert torch.allclose(live(X), X @ copied(Pair(2)))


# Compiled code with constants.


@pytest.fixture
def freezing() -> Iterator[None]:
    with inductor.patch(freezing=True):
        yield
    torch._dynamo.reset()
    sys.modules.pop("torch._inductor.freezing", None)  # every later commit would drop what is compiled


@pytest.mark.slow
@pytest.mark.usefixtures("freezing")
def test_constants_in_compiled_code_follow_a_swap() -> None:
    """The code calls torch's own kernels only, so that no C++ has to be compiled."""

    def layers(k: float) -> nn.Module:
        both = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        both.load_state_dict(weights_of(both, k))
        return both.eval()

    with torch.no_grad():
        compiled = torch.compile(layers(1), fullgraph=True)
        compiled(X)
        live = ms.Live(compiled)
        for k in range(2, 6):
            report = live.swap(layers(k).state_dict())
            assert torch.allclose(live(X), layers(k)(X))
            assert any("frozen weights" in note for note in report.notes)
        live.rollback()
        assert torch.allclose(live(X), layers(4)(X))


def test_a_frozen_torchscript_module_is_refused() -> None:
    scripted = torch.jit.script(Pair(1).eval())
    for frozen in (torch.jit.freeze(scripted), torch.jit.optimize_for_inference(scripted)):
        with pytest.raises(LiveTargetError, match=r"(?s)constants in its code.*as it is before torch\.jit\.freeze"):
            ms.Live(frozen)
    live = ms.Live(scripted)
    live.swap(Pair(2).state_dict())
    assert torch.allclose(live(X), Pair(2)(X))


# Modules of other libraries.


def with_adapter(k: float) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(Pair(k), peft.LoraConfig(target_modules=["a"], r=2)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, k)
    return model


@pytest.mark.slow
def test_an_adapter_follows_a_swap_unless_it_is_merged() -> None:
    live = ms.Live(with_adapter(1))
    live.swap(with_adapter(2).state_dict())
    assert torch.allclose(live(X), with_adapter(2)(X))
    merged = with_adapter(1)
    merged.merge_adapter()
    with pytest.raises(LiveTargetError, match=r"(?s)base_model\.model\.a: an adapter is merged.*unmerge_adapter"):
        ms.Live(merged)
    merged.unmerge_adapter()
    live = ms.Live(merged)
    live.swap(with_adapter(2).state_dict())
    assert torch.allclose(live(X), with_adapter(2)(X), atol=1e-5)
    live = ms.Live(with_adapter(1).merge_and_unload())
    live.swap(with_adapter(2).merge_and_unload().state_dict())
    assert torch.allclose(live(X), with_adapter(2)(X), atol=1e-4)


def test_an_offloaded_module_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    module = accelerate.cpu_offload(Pair(1).eval(), execution_device=torch.device("cpu"))
    with pytest.raises(LiveTargetError, match=r"(?s)Pair\.a: the weights are offloaded.*remove_hook_from_module"):
        ms.Live(module)
    accelerate.hooks.remove_hook_from_module(module, recurse=True)
    live = ms.Live(module)
    assert torch.equal(live(X), Pair(1)(X))
    live.swap(Pair(2).state_dict())
    assert torch.equal(live(X), Pair(2)(X))
