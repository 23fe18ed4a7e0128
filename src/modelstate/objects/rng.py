"""`RNG`: the states of random generators as one object to save and restore."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from modelstate.arguments import check_flag, invalid_option
from modelstate.errors import ObjectStateError, OptionError
from modelstate.formats.tree import same_value
from modelstate.text_format import listed, printable

_KINDS = "torch.Generator, numpy.random.Generator, BitGenerator or RandomState, or random.Random"


class _Generator(NamedTuple):
    """One interface to the generators of all libraries."""

    get: Callable[[], object]
    """Returns the state, which shares no memory with the generator."""
    set: Callable[[Any], object]
    """Sets the state. Raises for one that the generator does not take as it is."""


_POSITIONS = {"MT19937": ("state", "pos", 624), "Philox": ("", "buffer_pos", 4)}
"""Where the state of a generator of NumPy contains an index into itself, and the largest value of that."""


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
            raise invalid_option("generators", "must be a mapping", generators, expected="a dict")
        check_flag("cuda", cuda)
        self._global = {
            "python": _Generator(random.getstate, partial(_set_python, random)),
            "numpy": _numpy_legacy(np.random),
            "torch": _torch_generator(torch.default_generator.get_state, torch.default_generator.set_state),
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
        used_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return {name: generator.get() for name, generator in self._generators(used_cuda).items()}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Sets all generators, or none: on an error each one gets its earlier state back.

        Args:
            state_dict: the result of `state_dict`, of the same generators.

        Raises:
            ObjectStateError: The state lacks a generator, has an unknown one, or has a state that its generator does
                not take. The error has all problems.

        Examples:
            >>> ms.RNG().load_state_dict(state)
        """
        saved = state_dict if isinstance(state_dict, Mapping) else {}
        states = {printable(str(name)): state for name, state in saved.items()}
        if not self._cuda:
            states = {name: state for name, state in states.items() if not name.startswith("cuda: ")}
        generators = self._generators(True)
        problems = [
            f"{name}: nothing was saved for it"
            for name in generators
            if name not in states and not name.startswith("cuda: ")
        ]
        problems += [f"{name}: there is no such generator" for name in states if name not in generators]
        before: list[tuple[_Generator, object]] = []
        try:
            for name in filter(states.__contains__, generators):
                before.append((generators[name], generators[name].get()))
                try:
                    generators[name].set(states[name])
                except Exception as error:
                    problems.append(f"{name}: {_first_line(error)}")
            if problems:
                is_of_cuda = any(text.startswith("cuda: ") for text in problems)
                raise ObjectStateError(
                    "the state does not fit the random generators; nothing has been changed",
                    expected="what RNG.state_dict() returned, of the same generators",
                    found=listed(problems, 20, "\n    "),
                    remedy="RNG(cuda=False) leaves CUDA out" if is_of_cuda else "",
                )
        except BaseException:
            for generator, state in reversed(before):
                generator.set(state)
            raise

    def _generators(self, cuda: bool) -> dict[str, _Generator]:
        """Returns all generators by their names in a state, with those of CUDA where they are asked for."""
        of_cuda = {}
        for index in range(torch.cuda.device_count() if cuda and self._cuda else 0):
            get, put = partial(torch.cuda.get_rng_state, index), partial(torch.cuda.set_rng_state, device=index)
            of_cuda[f"cuda: {index}"] = _torch_generator(get, put)
        return {
            **self._global,
            **of_cuda,
            **{f"generators: {name}": generator for name, generator in self._own.items()},
        }


def _first_line(error: Exception) -> str:
    return printable(str(error).split("\n")[0]) or type(error).__qualname__


def _user_generator(name: str, given: object) -> _Generator:
    """Returns the interface to a generator of the user's. Raises `OptionError`."""
    generator = None
    if isinstance(given, torch.Generator):
        generator = _torch_generator(given.get_state, given.set_state)
    elif isinstance(given, np.random.RandomState):
        generator = _numpy_legacy(given)
    elif isinstance(given, np.random.Generator | np.random.BitGenerator):
        bits = given.bit_generator if isinstance(given, np.random.Generator) else given
        generator = _numpy_generator(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
    elif isinstance(given, random.Random):
        generator = _Generator(given.getstate, partial(_set_python, given))
    found, cause = f"a {type(given).__qualname__}", None
    try:
        if generator is not None:
            generator.get()
            return generator
    except Exception as error:  # random.SystemRandom has no state
        found, cause = f"{found}: {_first_line(error)}", error
    what = "not a random generator with a state"
    raise OptionError(what, where=name, expected=_KINDS, found=found) from cause


def _set_python(owner: Any, state: object) -> None:
    """Sets a `random.Random`, or the module `random`, which has the same methods."""
    owner.setstate(state)
    if owner.getstate() != state:  # setstate cuts off the upper bits of numbers that are too large
        raise ValueError("no state of random.Random")


def _numpy_legacy(owner: Any) -> _Generator:
    """Returns the interface to a `RandomState`, or to `numpy.random` itself, which has the same methods."""
    return _numpy_generator(partial(owner.get_state, legacy=False), owner.set_state)


def _numpy_generator(get: Callable[[], Any], set_state: Callable[[object], None]) -> _Generator:
    def checked_set(state: Mapping[str, Any]) -> None:
        # NumPy takes a position outside the state, and reads out of bounds there.
        place, key, most = _POSITIONS.get(get()["bit_generator"], ("", "", 0))
        position = (state.get(place, {}) if place else state).get(key, 0)
        if type(position) is not int or not 0 <= position <= most:
            raise ValueError(f"the position in the state is not one from 0 to {most}")
        set_state(state)
        if not same_value(dict(get()), dict(state)):
            raise ValueError(f"no state of {get()['bit_generator']}")

    return _Generator(get, checked_set)


def _torch_generator(get: Callable[[], object], set_state: Callable[[torch.Tensor], object]) -> _Generator:
    def checked_set(state: object) -> None:
        if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
            raise ValueError("no state of a torch.Generator")
        set_state(state.detach().cpu().contiguous())  # loading a checkpoint onto a device moves this tensor as well

    return _Generator(get, checked_set)
