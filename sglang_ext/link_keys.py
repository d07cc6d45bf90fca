"""Write a file of keys for links between machines: ``python -m sglang_ext.link_keys FILE``."""

import argparse
from pathlib import Path

from sglang_ext.managers.kv_transfer.endpoints import LinkKeys


def main() -> None:
    """Write a new file that only its owner can read, to be copied to each machine."""
    parser = argparse.ArgumentParser("python -m sglang_ext.link_keys", description=__doc__)
    parser.add_argument("file", type=Path, help="new file for --kv-link-keys of servers, or --keys of a prefix store")
    file = parser.parse_args().file
    try:
        LinkKeys.generate().write(file)
    except OSError as error:
        parser.error(f"{file} cannot be written: {error}; name a new file in a folder of yours")
    print(f"{file}: copy it to the other machines. Pass --kv-link-keys {file} to a prefill and a decode server,")
    print(f"or --keys {file} to a prefix store, and its URL with ?keys={file} to servers")


if __name__ == "__main__":
    main()
