"""Methods of the module that serves, training mode, and a version for a whole generation."""

import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import LiveTargetError, VersionGoneError
from tests.serve.targets import buffer_of, target_of

X = torch.ones(1, 4)


class Net(nn.Module):
    """All methods answer with the weights, each of which is the number of the version."""

    def __init__(self, k: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.layer.weight, k)
        self.size = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x)
        return answer

    def value(self, times: int = 1) -> float:
        return times * float(self.layer.weight[0, 0].detach())

    def between(self, first: Any, *, then: Any) -> tuple[float, float]:
        before = self.value()
        first()
        then()
        return before, self.value()

    def stream(self, count: int) -> Iterator[float]:
        for _ in range(count):
            yield self.value()

    def fail(self) -> None:
        raise ZeroDivisionError("of the method")

    def to(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a request has reached a method of nn.Module")


def served(k: float = 1, **options: Any) -> ms.Live:
    return ms.Live(Net(k).eval(), **options)


def weights(k: float) -> dict[str, torch.Tensor]:
    return Net(k).state_dict()


def test_a_method_has_the_version_of_its_block_from_begin_to_end() -> None:
    live, loads = served(), iter([2.0, 3.0])
    swap = lambda: live.swap(weights(next(loads)), timeout_seconds=0)  # noqa: E731
    with live.version() as v:
        assert (v.value(), v.value(times=3)) == (1, 3)
        assert v.between(swap, then=swap) == (1, 1)
        assert (v.id, v.value()) == (1, 1)
    with live.version() as v:
        assert (v.id, v.value()) == (3, 3)
    live.rollback()
    assert live.version().value() == 2


def test_a_generator_has_its_version_until_it_ends() -> None:
    live = served()
    stream = live.version().stream(3)
    assert next(stream) == 1
    live.swap(weights(2))
    assert list(stream) == [1, 1]
    assert list(live.version().stream(2)) == [2, 2]


def test_what_is_no_method_of_the_module() -> None:
    live = served()
    with live.version() as v:
        with pytest.raises(AttributeError, match="nothing_like_it"):
            v.nothing_like_it()
        with pytest.raises(AttributeError, match=r"Net.size is not a method, it is of type int"):
            v.size()
        with pytest.raises(AttributeError, match="requests cannot call 'to'"):
            v.to("meta")
        with pytest.raises(ZeroDivisionError, match="of the method"):
            v.fail()
        assert not any(hasattr(v, name) for name in ("load_state_dict", "train", "forward", "_apply", "__array__"))
        assert v.layer(X).shape == (1, 4)
        late = v.value
    assert late() == 1  # a method keeps its version
    with pytest.raises(VersionGoneError):
        v.value  # noqa: B018


def test_programs_have_no_methods_and_compiled_modules_have_their_own() -> None:
    exported = ms.Live(target_of("exported", Net(1).eval(), X))
    with pytest.raises(AttributeError, match="has only its call"):
        exported.version().value()
    compiled = ms.Live(target_of("compiled", Net(1).eval(), X))
    compiled.swap(weights(2))
    assert compiled.version().value() == 2


# Text generation, with a cache of keys and values that belongs to the weights that made it.

IDS = torch.tensor([[3, 1, 4, 1, 5]])
HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def language_model(seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=97
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.slow
def test_generation_has_one_version_while_weights_are_swapped(tmp_path: Path) -> None:
    models = [language_model(seed) for seed in range(3)]
    texts = [model.generate(IDS, **HOW) for model in models]
    assert not torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[1], texts[2])
    sources = []
    for seed, model in enumerate(models):
        model.save_pretrained(tmp_path / str(seed))
        sources.append(tmp_path / str(seed))
    live = ms.Live(language_model(0), keep_versions=0)
    ended, errors = threading.Event(), []

    def swaps() -> None:
        try:
            while not ended.is_set():
                live.swap(sources[live.version().id % 3])
        except BaseException as error:
            errors.append(error)

    swapping = threading.Thread(target=swaps)
    swapping.start()
    try:
        seen = set[int]()
        while len(seen) < 6 and not errors:
            with live.version() as v:  # by hand, a token at a time
                seen.add(v.id)
                logits = v(IDS, use_cache=True)
                ids, cache = IDS, logits.past_key_values
                for _ in range(HOW["max_new_tokens"]):
                    token = logits.logits[:, -1:].argmax(-1)
                    ids = torch.cat([ids, token], 1)
                    logits = v(token, past_key_values=cache, use_cache=True)
                assert torch.equal(ids, texts[(v.id - 1) % 3])
                assert torch.equal(v.generate(IDS, **HOW), ids)
    finally:
        ended.set()
        swapping.join(60)
    assert not errors
    del logits, cache
    live.swap(sources[0], timeout_seconds=60)


# Training mode.


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(x), 0.5, self.training)


def with_forward_of_its_own() -> nn.Module:
    module = nn.Linear(4, 4)
    vars(module)["forward"] = types.MethodType(lambda self, x: nn.functional.dropout(x, training=self.training), module)
    return module


MODES = {
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "recurrent": lambda: nn.LSTM(4, 4, 2, dropout=0.5),
    "own class": Dropping,
    "forward of the instance": with_forward_of_its_own,
}


@pytest.mark.parametrize("kind", MODES)
def test_training_mode_is_refused_unless_it_is_meant(kind: str, tmp_path: Path) -> None:
    module = MODES[kind]()
    path = tmp_path / "program.pt2"
    compiled = torch.compile(module, backend="eager")
    for serve in (lambda: ms.Live(module), lambda: ms.Live(compiled), lambda: ms.export(module, (X,), path)):
        with pytest.raises(LiveTargetError, match="training mode") as caught:
            serve()
        assert "module.eval()" in str(caught.value)
        assert "training=True" in str(caught.value)
    assert not path.exists()
    assert ms.Live(module, training=True).version().id == 1
    part = nn.Sequential(module).eval()
    module.train()
    with pytest.raises(LiveTargetError, match="training mode in 0"):
        ms.Live(part)
    module.eval()
    ms.Live(module)


def test_modules_that_have_no_mode_may_be_in_either(tmp_path: Path) -> None:
    ms.Live(Net(1))
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Embedding(2, 2), nn.Conv2d(1, 1, 1))
    assert module.training
    ms.Live(module)
    ms.Live(torch.jit.script(module))
    for scripted in (torch.jit.script(MODES["dropout"]()), torch.jit.trace(MODES["batch norm"](), torch.ones(3, 4))):
        with pytest.raises(LiveTargetError, match="training mode in 1, a"):
            ms.Live(scripted)
    ms.export(module[:3], (torch.randn(3, 4),), tmp_path / "program.pt2")


@pytest.mark.slow
def test_a_program_that_was_exported_in_training_mode_is_refused(tmp_path: Path) -> None:
    for make in (MODES["dropout"], MODES["batch norm"], MODES["own class"]):
        module, x = make(), torch.randn(3, 4)
        program = torch.export.export(module, (x,))
        with pytest.raises(LiveTargetError, match="training mode") as caught:
            ms.Live(program)
        assert "export module.eval()" in str(caught.value)
        ms.Live(program, training=True)
        ms.Live(torch.export.export(module.eval(), (x,)))
    torch.export.save(program, tmp_path / "program.pt2")
    with pytest.raises(LiveTargetError, match="training mode"):
        ms.Live(tmp_path / "program.pt2")


@pytest.mark.slow
def test_statistics_of_a_program_that_was_exported_in_training_mode(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(3, 4)
    ms.export(module, (x,), tmp_path / "program.pt2", training=True)
    live = ms.Live(tmp_path / "program.pt2", training=True)
    answer = live(x)
    assert torch.allclose(answer, module(x), atol=1e-5)
    assert torch.allclose(buffer_of(live, "1.running_mean"), module[1].running_mean)
