"""The plain CPU platform: when it steps in, which defaults it sets, how it hands out slots."""

import importlib
from dataclasses import dataclass, field, fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.server_args import ServerArgs

from sglang_ext.platforms import activate
from sglang_ext.platforms.torch_kernels import TorchPagedAllocator
from sglang_ext.platforms.plain_cpu import PlainCpuPlatform, run_without_pinning

POOL_PAGES = 12
MAX_REQUEST_TOKENS = 40


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with neither CUDA nor XPU, where nobody asked for SGLang's CPU engine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("accelerator", ["cuda", "xpu"])
def test_platform_stays_out_of_the_way_of_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    monkeypatch.setattr(getattr(torch, accelerator), "is_available", lambda: True)
    assert activate() is None


@pytest.mark.usefixtures("no_accelerator")
def test_platform_stays_out_of_the_way_of_sglangs_cpu_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


@pytest.mark.usefixtures("no_accelerator")
def test_platform_named_for_a_plain_cpu_can_be_loaded() -> None:
    module, name = activate().split(":")
    platform = getattr(importlib.import_module(module), name)()
    assert platform.get_device() == "cpu"
    assert platform.get_paged_allocator_cls() is TorchPagedAllocator


def server_args(**chosen: object) -> SimpleNamespace:
    """SGLang's arguments as the user left them: its own defaults, and what was chosen."""
    return SimpleNamespace(**({arg.name: arg.default for arg in fields(ServerArgs)} | chosen))


@pytest.mark.parametrize("attention_backend", [None, "intel_amx"])
def test_defaults_run_without_kernels_in_a_small_pool(attention_backend: str | None) -> None:
    args = server_args(attention_backend=attention_backend)
    PlainCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == "torch_native"
    assert args.sampling_backend == "pytorch"
    assert args.lora_backend == "torch_native"
    assert args.max_total_tokens == 32768
    assert args.disable_cuda_graph
    assert not args.disable_overlap_schedule, "as on a GPU"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("attention_backend", "triton"),
        ("sampling_backend", "flashinfer"),
        ("lora_backend", "triton"),
        ("max_total_tokens", 100),
    ],
)
def test_defaults_respect_what_the_user_set(option: str, value: object) -> None:
    args = server_args(**{option: value})
    PlainCpuPlatform().apply_server_args_defaults(args)
    assert getattr(args, option) == value


def test_pinning_is_ignored_where_a_function_asks_for_it() -> None:
    def pin(count: int) -> list[torch.Tensor]:
        made = [torch.zeros(count, pin_memory=True), torch.ones(count).pin_memory()]
        return [*made, torch.tensor([1], dtype=torch.int32, pin_memory=True, device="cpu")]

    zeros, ones, one = run_without_pinning(pin, count=2)
    assert zeros.tolist() == [0, 0] and ones.tolist() == [1, 1]
    assert one.dtype == torch.int32 and not one.is_pinned()


@dataclass
class Pool:
    """An allocator, and the slots of each live request in the order of its tokens."""

    page_size: int
    need_sort: bool
    requests: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocator = TorchPagedAllocator(
            POOL_PAGES * self.page_size,
            self.page_size,
            torch.float32,
            "cpu",
            kvcache=None,
            need_sort=self.need_sort,
        )

    def free_pages(self) -> list[int]:
        """Every page the allocator could still hand out, in ascending order."""
        return sorted(self.allocator.free_pages.tolist() + self.allocator.release_pages.tolist())

    def pages_of(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.page_size)

    def extend(self, growths: dict[int, int]) -> list[list[int]] | None:
        """Give request ``i`` ``growths[i]`` more slots, all in one call; None when full."""
        batch = [self.requests[i] for i in growths]
        prefix = torch.tensor([len(slots) for slots in batch])
        seq = prefix + torch.tensor(list(growths.values()))
        last = torch.tensor([slots[-1] if slots else -1 for slots in batch])
        out = self.allocator.alloc_extend(prefix, prefix, seq, seq, last, sum(growths.values()))
        return None if out is None else self.take(growths, out)

    def decode(self) -> torch.Tensor | None:
        """Give each live request one more slot, as a decoding step does."""
        lens = torch.tensor([len(slots) + 1 for slots in self.requests])
        last = torch.tensor([slots[-1] for slots in self.requests])
        out = self.allocator.alloc_decode(lens, lens, last)
        return None if out is None else self.take(dict.fromkeys(range(len(lens)), 1), out)

    def take(self, growths: dict[int, int], out: torch.Tensor) -> list[list[int]]:
        """Append the handed-out slots to their requests."""
        pieces = [piece.tolist() for piece in out.split(list(growths.values()))]
        for i, piece in zip(growths, pieces, strict=True):
            self.requests[i] += piece
        return pieces

    def free(self, i: int) -> None:
        """End request ``i``."""
        self.allocator.free(torch.tensor(self.requests.pop(i), dtype=torch.int64))

    def check(self) -> None:
        """No slot has two owners, pages are contiguous, and each page is free or in use."""
        used = [slot for slots in self.requests for slot in slots]
        assert len(set(used)) == len(used), "a slot was handed out twice"
        size, in_use = self.page_size, []
        for slots in self.requests:
            for start in range(0, len(slots), size):
                page, offset = divmod(slots[start], size)
                in_use.append(page)
                assert offset == 0, "a page starts inside another one"
                held = slots[start : start + size]
                assert held == list(range(held[0], held[0] + len(held))), "a page has gaps"
        assert sorted(in_use + self.free_pages()) == list(range(1, POOL_PAGES + 1))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.lists(st.integers(1, MAX_REQUEST_TOKENS), max_size=3)),
        st.tuples(st.just("extend"), st.lists(st.integers(0, MAX_REQUEST_TOKENS), max_size=3)),
        st.tuples(st.just("decode"), st.none()),
        st.tuples(st.just("free"), st.integers(0, 5)),
    ),
    max_size=25,
)


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_slots_have_one_owner_and_pages_no_gaps(
    page_size: int, need_sort: bool, steps: list[tuple[str, object]]
) -> None:
    pool = Pool(page_size, need_sort)
    for step, argument in steps:
        before, lens = pool.free_pages(), [len(slots) for slots in pool.requests]
        if step == "free":
            if argument < len(pool.requests):
                pool.free(argument)
            pool.check()
            continue
        if step == "start":
            growths = {len(lens) + i: tokens for i, tokens in enumerate(argument)}
            lens += [0] * len(growths)
            pool.requests += [[] for _ in growths]
        elif step == "extend":
            growths = dict(zip(range(len(lens)), argument, strict=False))
        else:
            growths = dict.fromkeys(range(len(lens)), 1)
        if not growths:
            continue
        needed = sum(pool.pages_of(lens[i] + n) - pool.pages_of(lens[i]) for i, n in growths.items())
        result = pool.decode() if step == "decode" else pool.extend(growths)
        if needed > len(before):
            assert result is None
            assert pool.free_pages() == before
            pool.requests = [slots for slots in pool.requests if slots]
        else:
            assert [len(piece) for piece in result] == list(growths.values())
            assert len(pool.free_pages()) == len(before) - needed
        pool.check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_full_pool_answers_none_and_keeps_its_free_list(page_size: int) -> None:
    pool = Pool(page_size, need_sort=False)
    pool.requests = [[], []]
    pool.extend({0: (POOL_PAGES - 1) * page_size})
    free_list = pool.allocator.free_pages.clone()
    assert pool.extend({1: page_size + 1}) is None
    assert torch.equal(pool.allocator.free_pages, free_list)
    assert pool.extend({1: page_size}) is not None
    assert pool.free_pages() == []


def test_new_tokens_fill_the_open_page_first() -> None:
    pool = Pool(page_size=4, need_sort=False)
    pool.requests = [[]]
    pool.extend({0: 3})
    free = pool.free_pages()
    pool.extend({0: 1})
    assert pool.free_pages() == free
    assert pool.requests[0] == list(range(pool.requests[0][0], pool.requests[0][0] + 4))


def test_released_pages_are_handed_out_again_when_sorting_is_needed() -> None:
    pool = Pool(page_size=4, need_sort=True)
    pool.requests = [[]]
    pool.extend({0: POOL_PAGES * 4})
    pool.free(0)
    pool.requests = [[]]
    assert pool.extend({0: POOL_PAGES * 4}) is not None
    pool.check()
