"""Which objects can be saved, and under which names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from modelstate import errors
from tests.store.training import Model, Positions, Saved


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "..", 3, None, "a\n", "a\0", "\ud800", "a\\b"])
@pytest.mark.parametrize("nested", [False, True])
def test_names_that_no_file_can_have(name: Any, nested: bool) -> None:
    objects = {name: nn.Linear(2, 2)}
    with pytest.raises(errors.OptionError, match="not a name"):
        Saved({"above": objects} if nested else objects)


def test_what_is_no_mapping_of_objects() -> None:
    model = nn.Linear(2, 2)
    for wrong in (model, [model], None, nn.ModuleDict()):
        with pytest.raises(errors.OptionError, match="from names to objects"):
            Saved(wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="list") as caught:
        Saved({"models": [1, model]})
    assert "Linear" in caught.value.found
    endless: dict[str, Any] = {"model": model}
    endless["again"] = endless
    with pytest.raises(errors.OptionError, match=r"nested|too long"):
        Saved(endless)


@pytest.mark.parametrize("make", [Model, Positions, lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))])])
def test_an_object_that_raises_when_it_is_asked(make: Callable[[], Any]) -> None:
    it = make()

    def state_dict() -> None:
        raise ZeroDivisionError

    it.state_dict = state_dict
    if isinstance(it, torch.optim.Optimizer):
        return  # it is asked for its parameters
    with pytest.raises(errors.ObjectStateError, match=r"it: .*asked for its state(.|\n)*ZeroDivisionError"):
        Saved({"it": it})
