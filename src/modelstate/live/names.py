"""The state of a module by the names that it has when it runs."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from modelstate.live.twin import twin
from modelstate.place.load import Source, load
from modelstate.plan.rules.rule import Rule
from modelstate.plan.rules.schema import Schema
from modelstate.plan.torch_private import unwrapped


def runtime_state(
    module: nn.Module, source: Source | None = None, *, rules: Iterable[Rule] | Schema = ()
) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a module, by their paths in the module tree that runs.

    The names, order and tensors of `torch.export.export(module, ...).state_dict`, whatever the module's state-dict
    hooks make of its `state_dict()`: a tied tensor stands under all its names. The tensors are the module's own.

    Given a source (see `modelstate.load`), it is the state that the module would have with that checkpoint, read into
    memory of its own through the module's own loading code, while the module itself stays as it is: so a checkpoint
    in the names of `state_dict()` gets those of the exported program, also where hooks split or fuse tensors.

    Raises what `modelstate.load` raises, and `LiveTargetError` where the module cannot be copied.
    """
    module = unwrapped(module)
    if source is not None:
        module = twin(module)
        load(module, source, rules=rules, map=False)
    state: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    state.update(module.named_buffers(remove_duplicate=False))
    for path, one in module.named_modules(remove_duplicate=False):
        for name in one._non_persistent_buffers_set:
            state.pop(f"{path}.{name}" if path else name, None)
    return state


def names_by_tensor(state: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """The names of each tensor of a state: several of one that is tied."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(map(tuple, names.values()))
