"""Transfers whose launch is put off are launched in order, and as soon as someone needs them."""

import pytest
import torch

from sglang_ext.device import Mark
from sglang_ext.mem_cache.host_tier.transfers import DeferredLaunches, LaunchedTransfer, Transfer

CPU = torch.device("cpu")


class Launches:
    """Launches that note their names."""

    def __init__(self):
        self.ran = []

    def __call__(self, name):
        def launch():
            self.ran.append(name)
            return LaunchedTransfer(Mark.now(CPU), Mark.now(CPU), wrong=None)

        return launch


def test_launches_run_at_once_outside_the_context_and_at_its_end_inside():
    deferral, launches = DeferredLaunches(), Launches()
    deferral.submit(launches("now"))
    assert launches.ran == ["now"]
    with deferral.until_end():
        for name in "ab":
            deferral.submit(launches(name))
        assert launches.ran == ["now"]
    assert launches.ran == ["now", "a", "b"]
    deferral.submit(launches("after"))
    assert launches.ran[-1] == "after"


@pytest.mark.parametrize("need", [Transfer.wait, Transfer.synchronize])
def test_who_waits_for_a_transfer_inside_the_context_has_it_launched_after_those_before_it(need):
    deferral, launches = DeferredLaunches(), Launches()
    with deferral.until_end():
        transfers = [Transfer(1, torch.tensor([0]), deferral.submit(launches(name))) for name in "abc"]
        assert not transfers[1].done
        need(transfers[1])
        assert launches.ran[:2] == ["a", "b"] and transfers[1].done
    assert launches.ran == ["a", "b", "c"]


def test_an_error_inside_the_context_does_not_keep_what_was_asked_for():
    deferral, launches = DeferredLaunches(), Launches()
    with pytest.raises(KeyError), deferral.until_end():
        deferral.submit(launches("asked"))
        raise KeyError
    assert launches.ran == ["asked"]
