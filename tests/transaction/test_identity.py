"""`identity`: who is who in a module."""

import torch
from torch import nn

import modelstate as ms


def module() -> nn.Module:
    made = nn.Module()
    made.a = made.b = nn.Parameter(torch.ones(4))
    made.register_buffer("whole", torch.arange(6.0))
    made.register_buffer("part", made.whole[2:4])
    made.register_buffer("hidden", torch.ones(2), persistent=False)
    made.lazy = nn.LazyLinear(2)
    return made


def test_nothing_changes_by_looking() -> None:
    made = module()
    optimizer = torch.optim.SGD([made.a])
    assert ms.identity(made, [optimizer]) == ms.identity(made, [optimizer])
    assert ms.identity(made).ties == (("a", "b"),)
    assert ms.identity(made).views == {("whole", "part")} or ms.identity(made).views == {("part", "whole")}
    assert set(ms.identity(made).objects) == {"a", "b", "whole", "part", "hidden", "lazy.weight", "lazy.bias"}


def test_every_kind_of_change_is_named() -> None:
    made = module()
    optimizer = torch.optim.SGD([made.a])
    before = ms.identity(made, [optimizer])
    made.b = nn.Parameter(torch.ones(4))
    made.part = made.part.clone()
    made.register_buffer("more", made.whole[:1])
    optimizer.param_groups[0]["params"][0] = made.b
    del made.hidden
    after = ms.identity(made, [optimizer])
    assert before != after
    assert before.differences(after) == [
        "b is another object",
        "part is another object",
        "hidden is gone",
        "more is new",
        "part and whole no longer share memory"
        if ("part", "whole") in before.views
        else "whole and part no longer share memory",
        "more and whole share memory now" if ("more", "whole") in after.views else "whole and more share memory now",
        "optimizer 0, group 0, place 0 refers to another object",
    ]
