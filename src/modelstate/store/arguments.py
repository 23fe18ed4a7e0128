"""What several arguments are checked for."""

from numbers import Real
from typing import TypeGuard

from modelstate.errors import OptionError


def is_number(given: object) -> TypeGuard[float]:
    """Whether it is a real number, NumPy's among them, and no truth value."""
    return isinstance(given, Real) and not isinstance(given, bool)


def metric_value(name: object, value: object) -> float:
    """The value of a metric as a float. Raises `OptionError` for a name or a value that cannot be saved."""
    if type(name) is not str:
        raise OptionError("the name of a metric is text", expected='such as "loss"', found=repr(name)[:200])
    try:
        if is_number(value):
            return float(value)
    except (ValueError, OverflowError):
        pass  # an int that no float can hold
    shape = getattr(value, "shape", None)
    found = repr(value)[:200] if shape is None else f"a {type(value).__name__} of shape {list(shape)}"
    if shape is None:
        remedy = "math.nan stands for a value that is not known yet" if value is None else ""
    elif any(length != 1 for length in shape):
        remedy = f"give one number, such as {name}.float().mean().item() of a tensor"
    else:
        remedy = f"give the number that it holds: {name if name.isidentifier() else 'value'}.item()"
    raise OptionError("the value of a metric is a number", where=f"metrics[{name!r}]", found=found, remedy=remedy)
