"""Calls besides a plain load, on sharded models: plans, transforms, optimizers, `load_state_dict`, `convert`."""

import re
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import modelstate as ms
from modelstate import errors
from modelstate.conversion.conversion import Conversion
from modelstate.transaction import transaction
from tests.distributed import models
from tests.distributed.ranks import Ranks, error_of

pytestmark = pytest.mark.slow
FULL = StateDictOptions(full_state_dict=True)


def same(net: nn.Module, whole: nn.Module) -> bool:
    found = models.gathered(net)
    return all(torch.equal(found[name], tensor.detach()) for name, tensor in whole.state_dict().items())


def fingerprint(net: nn.Module) -> list[tuple[int, str]]:
    """The identity and the bits of every tensor, as this rank holds it."""
    tensors = [*net.parameters(), *net.buffers()]
    locals_ = [models.local(tensor) for tensor in tensors]
    return [
        (id(tensor), "meta" if local.is_meta else str(local.dtype) + str(local.detach().tolist()))
        for tensor, local in zip(tensors, locals_, strict=True)
    ]


def by_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A function that looks at other elements than its own."""
    return tensor - tensor.mean() if tensor.is_floating_point() else tensor


def transforms(kind: str, path: str) -> bool:
    net, whole = models.sharded(kind), models.plain(kind, seed=9)
    ms.load(net, path, transform={"*.weight": by_rows})
    ms.load(whole, path, transform={"*.weight": by_rows})
    return same(net, whole)


@pytest.mark.parametrize("kind", ["fsdp", "shard1", "fsdp+tp", "uneven"])
def test_a_transform_sees_the_whole_tensor(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    ms.save(models.plain(kind, seed=5), tmp_path / "x.safetensors")
    assert ranks.values(transforms, kind, str(tmp_path / "x.safetensors")) == [True] * 4


def initialises(kind: str, path: str, meta: bool) -> list[str]:
    """What differs from a load on one machine, where the model initialises tensors and each rank has its own seed."""
    net, whole = models.sharded(kind, meta=meta), models.plain(kind, seed=9)
    rank = torch.distributed.get_rank()
    torch.manual_seed(5 + rank)
    options: Any = {"init_missing": True}
    report = ms.load(net, path, **options)
    generator = torch.get_rng_state()
    torch.manual_seed(5 + rank)
    own = torch.get_rng_state()
    torch.manual_seed(5)
    of_one = ms.load(whole, path, **options)
    wrong = [] if same(net, whole) else ["values"]
    wrong += [] if torch.equal(generator, own if rank else torch.get_rng_state()) else ["generator"]
    notes = [note for note in of_one.notes if "initialised by" in note]
    return (
        wrong if notes and [note for note in report.notes if "initialised by" in note] == notes else [*wrong, "notes"]
    )


@pytest.mark.parametrize(
    ("kind", "meta"),
    [("fsdp", False), ("fsdp+tp", False), ("shard1", False), ("hsdp", True), ("tp", True), ("empty", True)],
)
def test_missing_tensors_are_initialised_as_on_one_machine(ranks: Ranks, kind: str, meta: bool, tmp_path: Path) -> None:
    state = models.plain(kind, seed=5).state_dict()
    kept = {name: value for name, value in state.items() if "blocks.1" not in name and "embed" not in name}
    ms.save({name: value for name, value in kept.items() if "norm" not in name}, tmp_path / "x.safetensors")
    assert ranks.values(initialises, kind, str(tmp_path / "x.safetensors"), meta) == [[]] * 4


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        net(torch.arange(5) + step).square().mean().backward()
        optimizer.step()


def trained(net: nn.Module, seed: int = 0) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)


def goes_on(folder: str, meta: bool) -> list[bool]:
    """Whether training that goes on from a saved state is the training that was not interrupted."""
    net = models.sharded("uneven", seed=3)
    optimizer = trained(net)
    train(net, optimizer, 0, 2)
    weights = get_model_state_dict(net, options=FULL)
    state = get_optimizer_state_dict(net, optimizer, options=FULL)
    shards = get_optimizer_state_dict(net, optimizer)
    # Rank 0 alone has the whole state; the file has it for all.
    if torch.distributed.get_rank() == 0:
        torch.save({"model": weights, "optim": state}, f"{folder}/x.pt")
    torch.distributed.barrier()
    opened = ms.open(f"{folder}/x.pt")
    loaded = []
    for given in (opened.value("optim"), shards):
        other = models.sharded("uneven", seed=4, meta=meta)
        ms.load(other, opened, key="model")
        other_optimizer = trained(other)
        ms.load_optimizer_state(other, other_optimizer, given)
        loaded.append((other, other_optimizer))
    for model, of_model in ((net, optimizer), *loaded):
        train(model, of_model, 2, 2)
    expected = models.gathered(net)
    return [
        all(torch.equal(expected[name], found) for name, found in models.gathered(other).items()) for other, _ in loaded
    ]


@pytest.mark.parametrize("meta", [False, True])
def test_training_goes_on(ranks: Ranks, meta: bool, tmp_path: Path) -> None:
    assert ranks.values(goes_on, str(tmp_path), meta) == [[True, True]] * 4


def trained_state() -> tuple[Any, Any, dict[str, Any]]:
    net = models.sharded("fsdp")
    optimizer = trained(net)
    train(net, optimizer, 0, 1)
    return net, optimizer, get_optimizer_state_dict(net, optimizer, options=FULL)


def misfits() -> list[str]:
    """An optimizer state that one rank cannot take leaves all optimizers as they are."""
    net, optimizer, state = trained_state()
    before = str(ms.optimizer_state(net, optimizer))
    name = "blocks.0.q.weight"
    if torch.distributed.get_rank() == 3:
        state["state"] = {**state["state"], name: {**state["state"][name], "exp_avg": torch.zeros(1, 2)}}
    try:
        ms.load_optimizer_state(net, optimizer, state)
    except errors.OptimizerStateError as error:
        assert str(ms.optimizer_state(net, optimizer)) == before
        return [type(error).__name__, str("rank 3" in str(error) and name in str(error))]
    return []


def test_an_optimizer_state_that_one_rank_cannot_take(ranks: Ranks) -> None:
    assert ranks.values(misfits) == [["OptimizerStateError", "True"]] * 4


def other_states() -> list[str]:
    """The states of two steps, or other options, on different ranks. Nothing is loaded."""
    net, optimizer, state = trained_state()
    before = str(ms.optimizer_state(net, optimizer))
    here = torch.distributed.get_rank() == 2
    later = {name: {**entry, "exp_avg": entry["exp_avg"] + 1} for name, entry in state["state"].items()}
    found = []
    for given, options in (({**state, "state": later}, {}), (state, {"keep_options": ["lr"]})):
        try:
            ms.load_optimizer_state(net, optimizer, given if here else state, **(options if here else {}))
        except ms.ModelStateError as error:
            found.append(f"{type(error).__name__} {'ranks call modelstate.load_optimizer_state' in str(error)}")
        assert str(ms.optimizer_state(net, optimizer)) == before
    return found


def test_ranks_with_other_optimizer_states(ranks: Ranks) -> None:
    assert ranks.values(other_states) == [["DistributedError True"] * 2] * 4


def loads_in_two_threads(paths: list[str], mixed: bool, restores: bool = False) -> list[str]:
    """Loads two models in two threads, if `mixed` in another order on rank 1, if `restores` the second from a store."""
    nets = [models.sharded(kind) for kind in ("fsdp", "uneven")]
    before = [models.gathered(net) for net in nets]
    is_reading = threading.Event()
    found = ["", ""]

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_reading.set()
        return tensor

    def load(index: int) -> None:
        try:
            if restores and index == 1:
                ms.Store(paths[index]).restore({"model": nets[index]})
            else:
                ms.load(nets[index], paths[index], transform=transform)
        except ms.ModelStateError as error:
            found[index] = type(error).__name__

    order = [1, 0] if mixed and torch.distributed.get_rank() == 1 else [0, 1]
    threads = [threading.Thread(target=load, args=(index,)) for index in order]
    threads[0].start()
    is_reading.wait(0.3)
    threads[1].start()
    for thread in threads:
        thread.join()
    for index, net in enumerate(nets):
        is_same = all(torch.equal(value, before[index][name]) for name, value in models.gathered(net).items())
        found[index] = found[index] or "loaded"
        assert is_same == (found[index] != "loaded")
    return found


def test_loads_in_two_threads(ranks: Ranks, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{kind}.pt") for kind in ("fsdp", "uneven")]
    for kind, path in zip(("fsdp", "uneven"), paths, strict=True):
        ms.save(models.plain(kind), path)
    assert ranks.values(loads_in_two_threads, paths, True) == [["DistributedError"] * 2] * 4
    assert ranks.values(loads_in_two_threads, paths, False) == [["loaded"] * 2] * 4
    with ms.Store(tmp_path / "store") as store:
        store.save(1, {"model": models.plain("uneven")})
    paths[1] = str(tmp_path / "store")
    assert ranks.values(loads_in_two_threads, paths, False, True, timeout=30) == [["loaded"] * 2] * 4


def busy_on_one_rank(path: str) -> list[str]:
    """The errors of a load for which another thread holds the model on rank 1, and of the next load."""
    net, errors_of_loads = models.sharded("fsdp"), []
    ms.load(net, path)
    is_held, is_done = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.exclusive(net):
            is_held.set()
            is_done.wait()

    if dist.get_rank() == 1:
        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait()
    for _ in range(2):
        before = fingerprint(net)
        try:
            with mock.patch.object(transaction, "_TIMEOUT_SECONDS", 0.1):
                ms.load(net, path)
            errors_of_loads.append("")
        except ms.ModelStateError as error:
            errors_of_loads.append(type(error).__name__)
        assert fingerprint(net) == before
        if dist.get_rank() == 1:
            is_done.set()
            holder.join()
        dist.barrier()
    return errors_of_loads


def test_a_model_that_is_busy_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    ms.save(models.plain("fsdp"), tmp_path / "model.pt")
    assert ranks.values(busy_on_one_rank, str(tmp_path / "model.pt"), timeout=30) == [["ModelBusyError", ""]] * 4


def unfit_states() -> list[str]:
    """The errors of states that no rank can take its part of: factored ones, and shards of another number of ranks."""
    net = models.sharded("fsdp")
    optimizer: torch.optim.Optimizer = torch.optim.Adafactor(net.parameters())
    whole = models.plain("fsdp")
    of_whole = torch.optim.Adafactor(whole.parameters())
    train(whole, of_whole, 0, 1)
    factored = get_optimizer_state_dict(whole, of_whole)
    pairs = models.sharded("hsdp")  # shards of two ranks
    of_pairs = trained(pairs)
    train(pairs, of_pairs, 0, 1)
    other_ranks = get_optimizer_state_dict(pairs, of_pairs)
    found = []
    for state, target in ((factored, optimizer), (other_ranks, trained(net))):
        with pytest.raises(errors.OptimizerStateError) as error:
            ms.load_optimizer_state(net, target, state)
        found.append(str(error.value))
        assert not target.state
    return found


def test_states_that_no_rank_can_take_its_part_of(ranks: Ranks) -> None:
    for factored, other_ranks in ranks.values(unfit_states):
        assert "other values than one for each element are not split over the ranks of a DTensor" in factored
        assert "cannot be split over the ranks: DTensors that are placed in another way" in other_ranks


def loads_in_inference_mode(kind: str, path: str) -> list[str]:
    """The tensors that could not be trained after a load in inference mode."""
    found = []
    for meta, dtype in ((False, None), (False, "bf16"), (True, None)):
        net = models.sharded(kind, meta=meta)
        with torch.inference_mode():
            ms.load(net, path, dtype=dtype)
        tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        found += [name for name, tensor in tensors.items() if tensor.is_inference()]
        found += [name for name, tensor in net.named_parameters() if tensor.to_local().is_inference()]
        sum(parameter.to_local().sum() for parameter in net.parameters()).backward()
    return found


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_a_load_in_inference_mode(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    ms.save(models.plain(kind), tmp_path / "model.pt")
    assert ranks.values(loads_in_inference_mode, kind, str(tmp_path / "model.pt")) == [[]] * 4


def state_dicts(kind: str, assign: bool) -> list[str]:
    """What differs between ours and torch's `load_state_dict`, for state dicts of shards and of whole tensors."""
    wrong = []
    given = models.sharded(kind, seed=6)
    for name, state in (("shards", get_model_state_dict(given)), ("whole", get_model_state_dict(given, options=FULL))):
        ours, theirs = models.sharded(kind, meta=assign), models.sharded(kind, meta=assign)
        before = fingerprint(ours)
        outcomes = []
        for load in (ms.load_state_dict, nn.Module.load_state_dict):
            try:
                outcomes.append(str(load(ours if load is ms.load_state_dict else theirs, state, assign=assign)))
            except (RuntimeError, AttributeError) as error:
                outcomes.append(f"Error: {error}")
        if outcomes[0] != outcomes[1]:
            wrong.append(f"{name}: {outcomes}")
        elif "Error" in outcomes[0]:
            wrong += [] if fingerprint(ours) == before else [f"{name}: changed"]
        elif name == "shards":
            tokens = torch.arange(5)
            wrong += [] if torch.equal(ours(tokens), theirs(tokens)) else [f"{name}: forward"]
            train(ours, trained(ours), 0, 1)
    return wrong


@pytest.mark.parametrize(("kind", "assign"), [("fsdp", True), ("uneven", False)])
def test_load_state_dict_is_that_of_torch(ranks: Ranks, kind: str, assign: bool) -> None:
    assert ranks.values(state_dicts, kind, assign) == [[]] * 4


def converts(kind: str) -> list[str]:
    net, whole = models.sharded(kind, seed=2), models.plain(kind, seed=2)
    ids = [id(param) for param in net.parameters()]
    ms.convert(net, torch.bfloat16)
    ms.convert(whole, torch.bfloat16)
    assert ids == [id(param) for param in net.parameters()]
    wrong = [] if same(net, whole) else ["values"]
    if kind in ("fsdp", "uneven"):
        tokens = torch.arange(5)
        wrong += [] if torch.allclose(net(tokens), whole(tokens), rtol=0.1, atol=0.1) else ["forward"]
        before = fingerprint(net)
        try:
            ms.convert(net, torch.float32)
            wrong.append("converted in use")
        except errors.ModelStateError:
            wrong += [] if fingerprint(net) == before else ["changed"]
    return wrong


@pytest.mark.parametrize("kind", ["uneven", "fsdp+tp"])
def test_convert(ranks: Ranks, kind: str) -> None:
    assert ranks.values(converts, kind) == [[]] * 4


def converts_differently(options: dict[str, Any]) -> tuple[str, str, bool, torch.dtype]:
    """The error of a conversion to bfloat16 for which one rank has other options, and what the model is then."""
    net, is_other = models.sharded("fsdp", seed=2), dist.get_rank() == 2
    before = fingerprint(net)
    kind, text = error_of(lambda: ms.convert(net, **(options if is_other else {"dtype": torch.bfloat16})))
    is_same = fingerprint(net) == before
    ms.convert(net, "bf16" if is_other else torch.bfloat16)
    return kind, text, is_same, net.head.weight.dtype


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"dtype": torch.float16}, "DistributedError", r"ranks 0-1, 3: dtype=torch.bfloat16, .*ranks 2: .*float16"),
        ({"dtype": "nope"}, "OptionError", "dtype= must be"),
        ({"dtypes": "bf16"}, "OptionError", "no argument dtypes="),
    ],
)
def test_a_conversion_that_differs_on_one_rank(ranks: Ranks, options: dict[str, Any], kind: str, text: str) -> None:
    for found_kind, found, *rest in ranks.values(converts_differently, options, timeout=60):
        assert found_kind == kind
        assert re.search(text, found)
        assert rest == [True, torch.bfloat16]


def converts_with_an_interrupt() -> torch.dtype:
    """The dtype of a model after a conversion at whose commit one rank is interrupted."""
    net, commit = models.sharded("fsdp", seed=2), Conversion.commit

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGUSR2)
        commit(*arguments)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR2, interrupt)
    is_interrupted = dist.get_rank() == 1
    with (
        mock.patch.object(Conversion, "commit", interrupted if is_interrupted else commit),
        pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext(),
    ):
        ms.convert(net, torch.bfloat16)
    return net.head.weight.dtype


def test_an_interrupt_at_the_commit_of_a_conversion(ranks: Ranks) -> None:
    assert ranks.values(converts_with_an_interrupt, timeout=60) == [torch.bfloat16] * 4


def keeps_references(kind: str) -> list[str]:
    net, whole = models.sharded(kind, seed=2), models.plain(kind, seed=2)
    ids = [id(param) for param in net.parameters()]
    with ms.reference_keeping():
        net.to(torch.bfloat16)
        whole.to(torch.bfloat16)
    wrong = [] if ids == [id(param) for param in net.parameters()] else ["identity"]
    return wrong + ([] if same(net, whole) else ["values"])


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_reference_keeping(ranks: Ranks, kind: str) -> None:
    assert ranks.values(keeps_references, kind) == [[]] * 4


def refusals(path: str) -> dict[str, Any]:
    """The problems and errors of models that cannot be loaded."""
    found: dict[str, Any] = {}
    mesh = models.mesh(4)
    net = nn.Linear(8, 8)
    local = torch.zeros(8, 8)
    net.weight = nn.Parameter(DTensor.from_local(local, mesh, [Partial()], run_check=False))
    values = {"weight": torch.ones(8, 8), "bias": torch.ones(8)}
    cases: dict[str, Any] = {"partial": lambda: ms.load(net, values)}
    fsdp = nn.Linear(8, 8)
    fully_shard(fsdp, mesh=mesh)
    sharded: dict[str, Any] = get_model_state_dict(fsdp)
    whole = {name: tensor.redistribute(mesh, [Replicate()]) for name, tensor in sharded.items()}
    columns = {**sharded, "weight": sharded["weight"].redistribute(mesh, [Shard(1)])}
    before = fingerprint(fsdp)
    ms.load(fsdp, whole)
    assert fingerprint(fsdp) == before
    cases["other sharding"] = lambda: ms.load(fsdp, columns)
    cases["shape"] = lambda: ms.load(fsdp, {**values, "weight": torch.ones(8, 7)})
    cases["background"] = lambda: ms.load(fsdp, values, background=True)
    cases["device"] = lambda: ms.load(fsdp, values, device="meta")
    cases["timeout"] = lambda: ms.load(fsdp, values, timeout_seconds=0)
    for name, call in cases.items():
        try:
            call()
        except errors.PlanError as error:
            found[name] = sorted({problem.kind.name for problem in error.problems})
        except errors.ModelStateError as error:
            found[name] = type(error).__name__
    assert fingerprint(fsdp) == before
    return found


def test_refusals(ranks: Ranks) -> None:
    for found in ranks.values(refusals, ""):
        assert found == {
            "partial": ["UNLOADABLE_LAYOUT"],
            "other sharding": ["OTHER_SHARDING"],
            "shape": ["WRONG_SHAPE"],
            "background": "OptionError",
            "device": "OptionError",
            "timeout": "OptionError",
        }
