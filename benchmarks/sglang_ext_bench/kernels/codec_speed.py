"""How fast a device encodes and decodes pages of KV as anchor and residual, beside a copy of as many bytes on it.

    sglang-ext-bench codec-speed [--device cuda] [--layers 36] [--tokens 64 1024 8192]

A page holds keys and values of all layers, 8 heads of 128 channels each, bfloat16, normally distributed. Of each call the time in
which kernels run, and that of the call, the host's share in it. Bytes are those read and written: the pool's twice for an exact
residual, which reads the page once more.
"""

import argparse
from collections.abc import Callable

import torch
from sglang_ext_bench.kernels.compression_time import seconds
from torch.profiler import ProfilerActivity, profile

from sglang_ext.layers.kernels.lynx.codec import decode_page, encode_page
from sglang_ext.layers.kernels.lynx.layout import PageLayout

CHANNELS, DTYPE, REPEATS = 1024, torch.bfloat16, 7


def of_a_call(run: Callable[[], object], device: str, calls: int) -> float:
    """Seconds of one of so many calls, after which the device is waited for once."""
    return seconds(lambda: [run() for _ in range(calls)], device, REPEATS) / calls


def of_kernels(run: Callable[[], object], calls: int) -> float:
    """Seconds of one call in which the device computes or copies."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    return sum(each.self_device_time_total for each in profiled.key_averages()) / 1e6 / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 8192], help="of a page")
    parser.add_argument("--bits", type=int, default=4)
    asked = parser.parse_args()
    device = asked.device
    print("tokens | reference | encode | decode anchor | decode both | copy, GB/s of kernels (of calls); ms of calls")
    for tokens in asked.tokens:
        calls = max(1, 512 // tokens)
        pools = [torch.randn(tokens, CHANNELS, device=device).to(DTYPE) for _ in range(2 * asked.layers)]
        outs = [torch.empty_like(pool) for pool in pools]
        slots = torch.randperm(tokens, device=device)
        page = sum(pool.nbytes for pool in pools)
        source = torch.empty(page, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = of_a_call(lambda: target.copy_(source), device, calls)
        for reference in ("int8", "exact"):
            layout = PageLayout(tokens, CHANNELS, DTYPE, asked.bits, 4, reference=reference)
            streams = encode_page(pools, layout, slots)
            anchors, residuals = [each.anchor for each in streams], [each.residual for each in streams]
            sizes = [sum(each.nbytes for each in stream) for stream in (anchors, residuals)]
            again = page if reference == "exact" else 0
            timed = {
                "encode": (page + again + sum(sizes), lambda: encode_page(pools, layout, slots)),
                "decode anchor": (page + sizes[0], lambda: decode_page(anchors, None, layout, outs, slots)),
                "decode both": (page + sum(sizes), lambda: decode_page(anchors, residuals, layout, outs, slots)),
            }
            took = {name: of_a_call(run, device, calls) for name, (_, run) in timed.items()}
            alone = {name: of_kernels(run, calls) if device == "cuda" else took[name] for name, (_, run) in timed.items()}
            for pool, out in zip(pools, outs):
                assert reference == "int8" or pool[slots].equal(out[slots]), "exact residuals restore the pool's bits"
            rates = [f"{moved / alone[name] / 1e9:.1f} ({moved / took[name] / 1e9:.1f})" for name, (moved, _) in timed.items()]
            rates.append(f"{2 * page / copied / 1e9:.1f}")
            times = [f"{1e3 * each:.3f}" for each in (*took.values(), copied)]
            print(f"{tokens} | {reference} | {' | '.join(rates)}; {', '.join(times)}", flush=True)


if __name__ == "__main__":
    main()
