"""`RNG`: the states of random generators as one object to save and restore."""

import random
from collections.abc import Callable, Mapping
from functools import partial
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from modelstate.arguments import check_flag
from modelstate.errors import ObjectStateError, OptionError
from modelstate.formats.tree import same_value
from modelstate.text_format import printable, short_repr
from modelstate.transaction.transaction import Transaction

_VERSION = 1
_GLOBAL = ("python", "numpy", "torch")
_FIELDS = ("version", *_GLOBAL, "cuda", "generators")
_KINDS = "torch.Generator, numpy.random.Generator, BitGenerator or RandomState, or random.Random"


class _Generator(msgspec.Struct, frozen=True):
    """One interface to the generators of all libraries."""

    get: Callable[[], object]
    """Returns the state, which shares no memory with the generator."""
    set: Callable[..., object]
    check: Callable[..., None]
    """Raises for a state that `set` refuses, or accepts although it is invalid. Changes nothing."""


_POSITIONS = {"MT19937": ("state", "pos", 624), "Philox": ("", "buffer_pos", 4)}
"""Where the state of a generator of NumPy contains an index into itself, and the largest value of that."""
_Pairs = list[tuple[_Generator, object]]
"""Generators with the states that they get."""


class RNG:
    """The random generators of Python, NumPy (the global one), torch on the CPU and on every CUDA device.

    CUDA's generators are saved once the program has used CUDA: asking for them before would take memory on every
    device. They go by device number. A device that was not there when the state was saved keeps its generator as it
    is; a state of more devices than there are is refused.

    Args:
        generators: further generators by name: `torch.Generator`, `numpy.random.Generator`, `BitGenerator` or
            `RandomState`, `random.Random`.
        cuda: with False the generators of CUDA are neither saved nor restored.

    Raises:
        OptionError: A value is not a generator, or has no state, as `random.SystemRandom`.

    Examples:
        >>> rng = ms.RNG()
        >>> state = rng.state_dict()
        >>> first = torch.rand(3)
        >>> rng.load_state_dict(state)
        >>> torch.equal(torch.rand(3), first)
        True
    """

    restored_last = True
    """Other objects may draw random numbers while their own state is captured or restored."""

    def __init__(self, generators: Mapping[str, object] | None = None, *, cuda: bool = True) -> None:
        if not isinstance(generators, Mapping | None) or not all(type(name) is str for name in generators or ()):
            raise OptionError("generators= has generators by names", expected="a dict", found=short_repr(generators))
        check_flag("cuda", cuda)
        self._global = {
            "python": _Generator(random.getstate, random.setstate, _check_python),
            "numpy": _numpy_legacy(np.random),
            "torch": _torch_generator(torch.default_generator),
        }
        self._own = {name: _user_generator(name, generator) for name, generator in (generators or {}).items()}
        self._cuda = cuda

    def state_dict(self) -> dict[str, object]:
        """Returns the states of all generators.

        Returns:
            Tuples, numbers, arrays and tensors on the CPU, which modelstate's codec encodes.

        Examples:
            >>> state = ms.RNG().state_dict()
        """
        used_cuda = self._cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return {
            "version": _VERSION,
            **{name: generator.get() for name, generator in self._global.items()},
            "cuda": [generator.get() for generator in _cuda_generators()] if used_cuda else None,
            "generators": {name: generator.get() for name, generator in self._own.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Sets all generators, or none: the state is checked before the first generator is set.

        Args:
            state_dict: the result of `state_dict`, of the same generators.

        Raises:
            ObjectStateError: The state lacks a generator, has an unknown one, or has a state that its generator does
                not take. The error has all problems.

        Examples:
            >>> ms.RNG().load_state_dict(state)
        """
        message = "this is not the state of random generators"
        if not isinstance(state_dict, Mapping):
            raise _refused([], message, found=f"a {type(state_dict).__qualname__}")
        if set(state_dict) != set(_FIELDS):
            keys = printable(", ".join(map(str, list(state_dict)[:10])))[:200]
            raise _refused([], message, found=keys or "an empty mapping")
        version = state_dict["version"]
        if type(version) is not int or version != _VERSION:
            raise _refused([], "a state of a version that is not known here", found=short_repr(version))
        problems: list[str] = []
        pairs = [
            *_paired(self._global, {name: state_dict[name] for name in _GLOBAL}, "", problems),
            *self._cuda_pairs(state_dict["cuda"], problems),
            *_paired(self._own, state_dict["generators"], "generators: ", problems),
        ]
        if problems:
            raise _refused(problems, "the state does not fit the random generators; nothing has been changed")
        try:
            with Transaction(nn.Module()) as transaction:
                for generator, state in pairs:
                    transaction.register_undo(partial(generator.set, generator.get()))
                    generator.set(state)
                transaction.commit()
        except Exception as error:
            message = "a random generator could not be set; nothing has been changed"
            raise _refused([_first_line(error)], message) from error

    def _cuda_pairs(self, states: object, problems: list[str]) -> _Pairs:
        if not self._cuda or states is None:
            return []
        if not isinstance(states, list | tuple):
            problems.append(f"cuda: a {type(states).__qualname__}, where a list of states should be")
            return []
        generators = _cuda_generators()
        if len(states) > len(generators):
            devices = f"the state is of {len(states)} devices, and there are {len(generators)}"
            problems.append(f"cuda: {devices}; RNG(cuda=False) leaves CUDA out")
            return []
        by_index = {str(index): state for index, state in enumerate(states)}
        return _paired({index: generators[int(index)] for index in by_index}, by_index, "cuda: ", problems)


def _paired(generators: Mapping[str, _Generator], states: object, prefix: str, problems: list[str]) -> _Pairs:
    """Returns the generators with their states, each of which has been checked; adds to the problems."""
    if not isinstance(states, Mapping):
        problems.append(f"{prefix}a {type(states).__qualname__}, where states by names should be")
        return []
    problems += [f"{prefix}{name}: nothing was saved for it" for name in generators if name not in states]
    unknown = [printable(str(name)) for name in states if name not in generators]
    problems += [f"{prefix}{name}: there is no such generator" for name in unknown]
    pairs = [(name, generator, states[name]) for name, generator in generators.items() if name in states]
    for name, generator, state in pairs:
        try:
            generator.check(state)
        except Exception as error:
            problems.append(f"{prefix}{name}: {_first_line(error)}")
    return [(generator, state) for _, generator, state in pairs]


def _first_line(error: Exception) -> str:
    return printable(str(error).split("\n")[0]) or type(error).__qualname__


def _refused(problems: list[str], message: str, found: str = "") -> ObjectStateError:
    return ObjectStateError(
        message,
        expected="what RNG.state_dict() returned, of the same generators",
        found=found or "\n    ".join(problems),
    )


def _user_generator(name: str, given: object) -> _Generator:
    """Returns the interface to a generator of the user's. Raises `OptionError`."""
    if isinstance(given, torch.Generator):
        generator = _torch_generator(given)
    elif isinstance(given, np.random.RandomState):
        generator = _numpy_legacy(given)
    elif isinstance(given, np.random.Generator | np.random.BitGenerator):
        bits = given.bit_generator if isinstance(given, np.random.Generator) else given
        get = partial(getattr, bits, "state")
        generator = _Generator(get, partial(setattr, bits, "state"), partial(_check_numpy, get))
    elif isinstance(given, random.Random):
        generator = _Generator(given.getstate, given.setstate, _check_python)
    else:
        raise OptionError("no random generator", where=name, expected=_KINDS, found=f"a {type(given).__qualname__}")
    try:
        generator.check(generator.get())
    except Exception as error:
        raise OptionError(
            "a random generator whose state cannot be saved",
            where=name,
            expected=_KINDS,
            found=f"a {type(given).__qualname__}: {_first_line(error)}",
        ) from error
    return generator


def _check_python(state: tuple[object, ...]) -> None:
    trial = random.Random(0)
    trial.setstate(state)
    # setstate cuts off the upper bits of numbers that are too large, and takes any value for the cached Gaussian.
    if trial.getstate() != state or not isinstance(state[2], float | NoneType):
        raise ValueError("no state of random.Random")


def _numpy_legacy(owner: Any) -> _Generator:
    """Returns the interface to a `RandomState`, or to `numpy.random` itself, which has the same methods."""
    get = partial(owner.get_state, legacy=False)
    return _Generator(get, owner.set_state, partial(_check_numpy, get))


def _check_numpy(get: Callable[[], Any], state: Mapping[str, Any]) -> None:
    name = get()["bit_generator"]
    if state["bit_generator"] != name:
        raise ValueError(f"the state is of {state['bit_generator']}, the generator is {name}")
    # NumPy takes a position outside the state, and reads out of bounds there.
    place, key, most = _POSITIONS.get(name, ("", "", 0))
    position = (state[place] if place else state)[key] if key else 0
    if type(position) is not int or not 0 <= position <= most:
        raise ValueError(f"the position in the state is not one from 0 to {most}")
    bits = getattr(np.random, name)(0)
    bits.state = {key: value for key, value in state.items() if key not in ("has_gauss", "gauss")}
    if "gauss" in state:
        np.random.RandomState(bits).set_state(dict(state))
    if not same_value(dict(bits.state), {key: state[key] for key in bits.state}):
        raise ValueError(f"no state of {name}")


def _torch_generator(generator: torch.Generator) -> _Generator:
    return _Generator(
        generator.get_state,
        lambda state: generator.set_state(_state_bytes(state)),
        partial(_check_torch, generator.device),
    )


def _cuda_generators() -> list[_Generator]:
    """Returns the generators of the CUDA devices, by device number."""

    def of_device(index: int) -> _Generator:
        return _Generator(
            partial(torch.cuda.get_rng_state, index),
            lambda state: torch.cuda.set_rng_state(_state_bytes(state), index),
            partial(_check_torch, torch.device("cuda", index)),
        )

    return [of_device(index) for index in range(torch.cuda.device_count())]


def _check_torch(device: torch.device, state: object) -> None:
    torch.Generator(device).set_state(_state_bytes(state))


def _state_bytes(state: object) -> torch.Tensor:
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
        raise ValueError("no state of a torch.Generator")
    # Loading a checkpoint onto a device moves this tensor as well.
    return state.detach().cpu().contiguous()
