"""What `modelstate.process` keeps for each thread."""

import threading

import pytest

from modelstate.process import ThreadValue


def test_a_value_is_replaced_in_one_thread_within_a_block() -> None:
    value, elsewhere = ThreadValue("outside"), list[str]()
    thread = threading.Thread(target=lambda: elsewhere.append(value.value))
    with value.replaced("outer"):
        thread.start()
        thread.join()
        with value.replaced("inner"):
            assert value.value == "inner"
        assert value.value == "outer"
    assert (value.value, elsewhere) == ("outside", ["outside"])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_value_is_put_back_after_an_error(error: type[BaseException]) -> None:
    value = ThreadValue("outside")
    with pytest.raises(error), value.replaced("inside"):
        raise error
    assert value.value == "outside"
