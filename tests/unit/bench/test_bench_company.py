"""Who is under way in a soak beside whom."""

import threading
from concurrent.futures import ThreadPoolExecutor

from sglang_ext.bench.soaking.company import Company


def test_one_beside_whom_another_begins_or_is_is_not_alone() -> None:
    company = Company()
    with company.join(alone=False) as first:
        assert first.alone
        with company.join(alone=False) as second:
            pass
    with company.join(alone=False) as third:
        pass
    assert (first.alone, second.alone, third.alone) == (False, False, True)


def test_who_must_be_alone_waits_for_the_others_and_keeps_new_ones_out() -> None:
    company, inside, order = Company(), threading.Event(), []

    def be_alone() -> bool:
        with company.join(alone=True) as stay:
            order.append("alone")
            inside.set()
        return stay.alone

    def join() -> None:
        with company.join(alone=False):
            order.append("another")

    with ThreadPoolExecutor(2) as pool:
        with company.join(alone=False) as first:
            waiting = pool.submit(be_alone)
            while not company._waiting_for_none:
                pass
            other = pool.submit(join)
            assert not inside.wait(0.05) and not order
        assert waiting.result(10) and first.alone
        other.result(10)
    assert order == ["alone", "another"]


def test_many_that_must_be_alone_each_are() -> None:
    company = Company()

    def stay(alone: bool) -> bool:
        with company.join(alone) as found:
            pass
        return found.alone

    with ThreadPoolExecutor(8) as pool:
        alone = [number % 3 == 0 for number in range(300)]
        assert all(found for found, asked in zip(pool.map(stay, alone), alone) if asked)
