"""Modules, compiled or not: an instance for each version."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from modelstate.errors import LiveTargetError
from modelstate.problems import REAL
from modelstate.rules.rule import Rule
from modelstate.serve.buffers import renew
from modelstate.serve.captured_references import check_captured_references
from modelstate.serve.checks import check_mode
from modelstate.serve.meta_clone import meta_clone
from modelstate.serve.state_names import runtime_state
from modelstate.torch_compat.plain import is_fake, is_sharded
from modelstate.torch_compat.private import compiled_like, compiled_module, has_compiled_call, unwrapped


class ModuleProgram:
    """An instance of a module, and how it is called: as it is, or compiled."""

    __slots__ = ("_call", "holder")

    def __init__(self, holder: nn.Module, call: Callable[..., Any]) -> None:
        self.holder = holder
        self._call = call

    @property
    def module(self) -> nn.Module:
        return self.holder

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.holder.named_buffers())

    def end(self) -> None:
        pass

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._call(*args, **named)


class ModuleTarget:
    """An eager module, or what `torch.compile` has made of one.

    A version of a compiled module is another instance under the same compilation: its code runs again as it is, as
    strides, `requires_grad` and ties are the same in every version.
    """

    fixed: tuple[str, ...] = ()
    seats = None

    def __init__(self, module: nn.Module, training: bool) -> None:
        if len(getattr(module, "device_ids", None) or ()) < 2:  # a call of the wrapper is a call of the module
            module = unwrapped(module, keep_compiled=True)
        compiled = compiled_module(module)
        original = module if compiled is None else compiled
        self.kind = "eager" if compiled is None else "compiled"
        self.name = type(original).__name__
        for path, one in original.named_modules():
            if has_compiled_call(one) or compiled_module(one) is not None:
                raise LiveTargetError(
                    "a part of the module is compiled in place, and a copy of it would not be",
                    where=f"{self.name}.{path}" if path else self.name,
                    remedy="compile the whole: Live(torch.compile(module))",
                )
        _check_values(original, self.name)
        self._skeleton = meta_clone(original)
        check_captured_references(original, self._skeleton)
        check_mode(original, training)  # last: of what can be remedied by eval() alone
        # Not the module itself, whose memory would then outlive version 1.
        self._compiled = None if compiled is None else compiled_like(module, self._skeleton)
        self._first: ModuleProgram | None = ModuleProgram(original, module)

    def first(self) -> ModuleProgram:
        given, self._first = self._first, None
        assert given is not None
        return given

    def names(self) -> Collection[str]:
        return list(self._skeleton.state_dict())

    def is_runtime(self, given: Collection[str]) -> bool:
        saved, runs = set(self._skeleton.state_dict()), set(runtime_state(self._skeleton))
        return not (runs - saved).isdisjoint(given) and (saved - runs).isdisjoint(given)

    def rules(self, given: Collection[str]) -> tuple[Rule, ...]:
        return ()

    def skeleton(self, given: Collection[str]) -> nn.Module:
        return meta_clone(self._skeleton)

    def hidden(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self._skeleton.named_buffers() if not buffer.is_meta}

    def renew(self, program: ModuleProgram) -> None:
        renew(program.holder, self._skeleton)

    def refused(self, unexpected: list[str]) -> None:
        return None

    def program(self, filled: nn.Module) -> ModuleProgram:
        return ModuleProgram(filled, filled if self._compiled is None else compiled_like(self._compiled, filled))


def _check_values(module: nn.Module, name: str) -> None:
    """Raises `LiveTargetError` for tensors that no other version could have: fake ones, and shards."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for path, tensor in tensors:
        if is_sharded(tensor):
            raise LiveTargetError(
                "a module with DTensors (of FSDP2 or tensor parallelism) cannot be served in versions",
                where=f"{name}.{path}",
                found="a DTensor: this process may hold only a shard",
                remedy="serve the module as it is before fully_shard or distribute_tensor, with a whole checkpoint",
            )
        if is_fake(tensor):
            raise LiveTargetError(
                "a module with fake tensors cannot be served", where=f"{name}.{path}", found="a FakeTensor", remedy=REAL
            )
