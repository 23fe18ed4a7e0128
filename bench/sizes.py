"""How large the models are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is."""

    hidden: int = 1024
    layers: int = 16
    vocabulary: int = 32_000
    small_blocks: int = 5_000
    """Blocks of four small tensors, all children of one module."""
    children: tuple[int, ...] = (5_000, 10_000, 20_000)
    """Modules with one tensor each, for the cost of `load_state_dict` by their number."""
    most_children_of_torch: int = 10_000
    """With more, torch's own is not asked."""
    open_bytes: tuple[int, ...] = (10**9, 10**11)
    """Sizes of the sparse files that are opened."""
    requests: int = 10_000
    """To a server, once without swaps and once with them."""
    swaps: int = 100
    matrices: tuple[int, int] = (24, 1024)
    """How many there are in the program that is served, and how wide they are."""
    torture_seconds: float = 60.0
    """How long weights are swapped under requests."""


QUICK = Sizes(
    hidden=64,
    layers=2,
    vocabulary=500,
    small_blocks=50,
    children=(50, 100),
    open_bytes=(10**7, 10**9),
    requests=40,
    swaps=10,
    matrices=(2, 64),
    torture_seconds=0.3,
)
