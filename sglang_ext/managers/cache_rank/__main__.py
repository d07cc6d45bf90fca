"""``python -m sglang_ext.managers.cache_rank``: the process of a cache rank, started by an inference rank (rank_link.py)."""

import argparse
import logging
import os
import signal
import sys

import torch
import zmq

from sglang_ext.managers.cache_rank.protocol import MAX_MESSAGE_BYTES
from sglang_ext.managers.cache_rank.selection_server import SelectionServer

# Send timeout. An inference rank that receives nothing for this long counts as ended.
SEND_MS = 10_000
logger = logging.getLogger("sglang_ext.cache_rank")


def main() -> None:
    """Serve until the inference rank ends, or until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True, help="socket of the inference rank")
    parser.add_argument("--memory", type=int, help="inherited descriptor of the exchange buffer; none on a GPU")
    parser.add_argument("--epoch", type=int, required=True, help="number of this process among those that the inference rank starts")
    parser.add_argument("--threads", type=int, required=True, help="threads of matrix products")
    parser.add_argument("--parent", type=int, required=True, help="process id of the inference rank")
    parser.add_argument("--device", required=True, help="device that runs the selection")
    args = parser.parse_args()
    logging.basicConfig(format=f"%(asctime)s cache rank {os.getpid()}: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Ctrl-C is for the inference rank; this process ends after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(args.threads)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger, socket.maxmsgsize, socket.sndtimeo = 0, MAX_MESSAGE_BYTES, SEND_MS
    socket.connect(args.endpoint)
    try:
        with torch.inference_mode():
            server = SelectionServer(socket, args.memory, args.epoch, torch.device(args.device))
            server.serve(lambda: os.getppid() == args.parent)
    except Exception:
        logger.exception("sglang-ext: the cache rank ends; the inference rank continues without it, and starts another")
        sys.exit(1)


if __name__ == "__main__":
    main()
