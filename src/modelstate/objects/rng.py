"""The states of random generators, as one object to save and restore."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import torch

from modelstate.codec.codec import decode, encode
from modelstate.errors import OptionError, RandomStateError
from modelstate.text_format import printable

_VERSION = 1
_GLOBAL = ("python", "numpy", "torch")
_FIELDS = ("version", *_GLOBAL, "cuda", "generators")
_KINDS = "torch.Generator, numpy.random.Generator, BitGenerator or RandomState, or random.Random"


@dataclass(frozen=True, slots=True)
class _Generator:
    get: Callable[[], Any]
    """Its state, which shares nothing with it."""
    set: Callable[[Any], object]
    check: Callable[[Any], None]
    """Raises for a state that `set` does not take, or takes and then is not what it says. Changes nothing."""


class RNG:
    """The random generators of Python, NumPy (the global one), torch on the CPU and on every CUDA device.

    `generators` are further ones by names of one's own: `torch.Generator`, `numpy.random.Generator`, `BitGenerator` or
    `RandomState`, `random.Random`. After `load_state_dict` all of them draw the numbers that they would have drawn
    after `state_dict`.

    CUDA's are saved once the program has used CUDA: asking for them before would take memory on every device. They go
    by the numbers of the devices: devices that were not there when the state was saved keep what they have; a state of
    more devices than there are is refused. With `cuda=False` CUDA is left alone, and so is what a state has of it.

    Raises `OptionError` for what is no generator, or has no state, as `random.SystemRandom`.
    """

    restored_last = True
    """Others may draw from them while their own state is taken or given."""

    def __init__(self, generators: Mapping[str, Any] | None = None, *, cuda: bool = True) -> None:
        if not isinstance(generators, Mapping | None) or not all(type(name) is str for name in generators or ()):
            raise OptionError("generators= has generators by names", expected="a dict", found=repr(generators))
        self._global = {
            "python": _Generator(random.getstate, random.setstate, _check_python),
            "numpy": _legacy(np.random),
            "torch": _of_torch(torch.default_generator),
        }
        self._own = {name: _generator(name, given) for name, given in (generators or {}).items()}
        self._cuda = cuda

    def state_dict(self) -> dict[str, Any]:
        """The states: tuples, numbers, arrays and tensors on the CPU, which modelstate's codec encodes."""
        return {
            "version": _VERSION,
            **{name: generator.get() for name, generator in self._global.items()},
            "cuda": self._cuda_states(),
            "generators": {name: generator.get() for name, generator in self._own.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets all generators, or none: what `state_dict` returned is checked before the first one is set.

        Raises `RandomStateError` for a state that lacks something, has something more, or that a generator does not
        take; all of these are in the one error.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != set(_FIELDS):
            raise _refused([], "this is no state of random generators", found=_shown(state_dict))
        version = state_dict["version"]
        if type(version) is not int or version != _VERSION:
            raise _refused([], "a state of a version that is not known here", found=printable(repr(version))[:80])
        problems: list[str] = []
        pairs = [
            *_paired(self._global, {name: state_dict[name] for name in _GLOBAL}, "", problems),
            *self._cuda_pairs(state_dict["cuda"], problems),
            *_paired(self._own, state_dict["generators"], "generators: ", problems),
        ]
        if problems:
            raise _refused(problems, "the state does not fit the random generators; nothing has been changed")
        _set_all(pairs)

    def _cuda_states(self) -> list[torch.Tensor] | None:
        used = self._cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return [generator.get() for generator in _devices()] if used else None

    def _cuda_pairs(self, states: Any, problems: list[str]) -> list[tuple[_Generator, Any]]:
        if not self._cuda or states is None:
            return []
        if not isinstance(states, list | tuple):
            problems.append(f"cuda: a {type(states).__qualname__}, where a list of states should be")
            return []
        here = _devices()
        if len(states) > len(here):
            devices = f"the state is of {len(states)} devices, and there are {len(here)}"
            problems.append(f"cuda: {devices}; RNG(cuda=False) leaves CUDA out")
            return []
        given = {str(index): state for index, state in enumerate(states)}
        return _paired({str(index): here[index] for index in range(len(states))}, given, "cuda: ", problems)


def _shown(given: object) -> str:
    if not isinstance(given, Mapping):
        return f"a {type(given).__qualname__}"
    return printable(", ".join(map(str, list(given)[:10])))[:200] or "an empty mapping"


def _paired(
    generators: dict[str, _Generator], states: Any, where: str, problems: list[str]
) -> list[tuple[_Generator, Any]]:
    """The generators with their states, each of which has been checked."""
    if not isinstance(states, Mapping):
        problems.append(f"{where}a {type(states).__qualname__}, where states by names should be")
        return []
    problems += [f"{where}{name}: nothing was saved for it" for name in generators if name not in states]
    strange = [printable(str(name)) for name in states if name not in generators]
    problems += [f"{where}{name}: there is no such generator" for name in strange]
    pairs = [(name, generator, states[name]) for name, generator in generators.items() if name in states]
    for name, generator, state in pairs:
        try:
            generator.check(state)
        except Exception as error:
            problems.append(f"{where}{name}: {_first_line(error)}")
    return [(generator, state) for _, generator, state in pairs]


def _first_line(error: Exception) -> str:
    return printable(str(error).split("\n")[0]) or type(error).__qualname__


def _set_all(pairs: list[tuple[_Generator, Any]]) -> None:
    before = [generator.get() for generator, _ in pairs]
    try:
        for generator, state in pairs:
            generator.set(state)
    except BaseException as error:
        for (generator, _), state in zip(pairs, before, strict=True):
            generator.set(state)
        if not isinstance(error, Exception):
            raise
        raise _refused([_first_line(error)], "a random generator could not be set; nothing has been changed") from error


def _refused(problems: list[str], what: str, found: str = "") -> RandomStateError:
    return RandomStateError(
        what,
        expected="what RNG.state_dict() returned, of the same generators",
        found=found or "\n    ".join(problems),
    )


def _generator(name: str, given: Any) -> _Generator:
    """How to get and set the state of a generator of the user's. Raises `OptionError`."""
    if isinstance(given, torch.Generator):
        made = _of_torch(given)
    elif isinstance(given, np.random.RandomState):
        made = _legacy(given)
    elif isinstance(given, np.random.Generator | np.random.BitGenerator):
        made = _of_numpy(given.bit_generator if isinstance(given, np.random.Generator) else given)
    elif isinstance(given, random.Random):
        made = _Generator(given.getstate, given.setstate, _check_python)
    else:
        raise OptionError("no random generator", where=name, expected=_KINDS, found=f"a {type(given).__qualname__}")
    try:
        made.check(made.get())
    except Exception as error:
        raise OptionError(
            "a random generator whose state cannot be saved",
            where=name,
            expected=_KINDS,
            found=f"a {type(given).__qualname__}: {_first_line(error)}",
        ) from error
    return made


def _check_python(state: Any) -> None:
    trial = random.Random(0)
    trial.setstate(state)
    # Python cuts off the upper bits of numbers that are too large, and takes anything for the number that is left over.
    if trial.getstate() != state or not isinstance(state[2], float | NoneType):
        raise ValueError("no state of random.Random")


def _legacy(owner: Any) -> _Generator:
    """A `RandomState`, or `numpy.random` itself, which is one."""
    get = partial(owner.get_state, legacy=False)
    return _Generator(get, owner.set_state, partial(_check_numpy, "$numpy.random.RandomState", get))


def _of_numpy(bits: Any) -> _Generator:
    def get() -> Any:
        return bits.state

    def put(state: Any) -> None:
        bits.state = state

    return _Generator(get, put, partial(_check_numpy, "$numpy.random.BitGenerator", get))


def _check_numpy(tag: str, get: Callable[[], Any], state: Any) -> None:
    # NumPy takes positions outside the state, and reads there. The codec does not.
    fields = {"state": encode(state)}
    decode({tag: fields if tag.endswith("RandomState") else {**fields, "seed": None}})
    own = get()["bit_generator"]
    if state["bit_generator"] != own:
        raise ValueError(f"the state is of {state['bit_generator']}, the generator is {own}")


def _of_torch(generator: torch.Generator) -> _Generator:
    def put(state: torch.Tensor) -> None:
        generator.set_state(_bytes(state))

    return _Generator(generator.get_state, put, partial(_check_torch, generator.device))


def _devices() -> list[_Generator]:
    """The generators of the CUDA devices."""
    return [_device(index) for index in range(torch.cuda.device_count())]


def _device(index: int) -> _Generator:
    return _Generator(
        partial(torch.cuda.get_rng_state, index),
        lambda state: torch.cuda.set_rng_state(_bytes(state), index),
        partial(_check_torch, torch.device("cuda", index)),
    )


def _check_torch(device: torch.device, state: Any) -> None:
    torch.Generator(device).set_state(_bytes(state))


def _bytes(state: Any) -> torch.Tensor:
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
        raise ValueError("no state of a torch.Generator")
    # Loading a checkpoint with a device for all of its tensors moves this one as well.
    return state.detach().cpu().contiguous()
