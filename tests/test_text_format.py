import pytest
import torch

import modelstate as ms
from modelstate.text_format import printable, size


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (90_868_376, "90.9 MB"),
        (999_999, "1.0 MB"),
        (999_949, "999.9 kB"),
        (2 * 10**12, "2.0 TB"),
        (999.7, "1.0 kB"),
        (10**19, "10,000.0 PB"),
    ],
)
def test_size(nbytes: int, expected: str) -> None:
    assert size(nbytes) == expected


def test_names_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2Jb\nc\u202e") == r"a\x1b[2Jb\nc\u202e"
    assert printable("größe ×") == "größe ×"


def test_plan_and_report_round_as_everything_else_does() -> None:
    module = torch.nn.PReLU(249_990)
    plan = ms.plan(module, module.state_dict())
    assert "1.0 MB to read" in str(plan)
    assert "1.0 MB" in str(ms.load(module, plan))
