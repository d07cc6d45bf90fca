"""SGLang frontend programs: gen, select, fork, a regular expression, and a batch.

make serve                                                     # in another terminal
.venv/bin/python examples/frontend_program.py [URL [router]]   # default http://127.0.0.1:30000

The programs are stock SGLang: a verified server answers them as a stock one does. With `router` they run behind SGLang's
router of a prefill and a decode server (`make serve-pd`), which refuses the lists of prompts that `select` sends.
"""

import inspect
import sys
import textwrap
from urllib.error import URLError

import sglang as sgl

from sglang_ext.router_endpoint import RouterEndpoint

SOURCE = inspect.getsource(textwrap)[:2000]


@sgl.function
def review(s: sgl.lang.interpreter.ProgramState, source: str) -> None:
    """Describe a module, then judge it: the parts share the source's KV."""
    s += f"A Python module:\n\n{source}\n\nIn one sentence, this module"
    s += sgl.gen("summary", max_tokens=32, temperature=0, stop="\n")
    s += "\n\nIt works on" + sgl.select("subject", choices=[" text", " numbers", " pictures"])
    s += ".\n\nThe year in which it was first written: "
    s += sgl.gen("year", max_tokens=8, temperature=0, regex=r"(19|20)[0-9]{2}")
    strength, weakness = s.fork(2)
    strength += "\n\nIts greatest strength is" + sgl.gen("text", max_tokens=24, temperature=0)
    weakness += "\n\nIts greatest weakness is" + sgl.gen("text", max_tokens=24, temperature=0)
    s["strength"], s["weakness"] = strength["text"], weakness["text"]


def main(url: str = "http://127.0.0.1:30000", before: str = "server") -> None:
    """Run the program once, then as a batch; ``before`` is what answers there, ``server`` or ``router``."""
    try:
        sgl.set_default_backend(RouterEndpoint(url) if before == "router" else sgl.RuntimeEndpoint(url))
    except URLError as error:
        sys.exit(f"no server answers at {url} ({error.reason}): start one with `make serve`, or pass the URL of another one")
    state = review.run(source=SOURCE)
    if state.error() is not None:
        sys.exit(f"the program ended with: {state.error()}\nbefore SGLang's router add: {url} router")
    for name in ("summary", "subject", "year", "strength", "weakness"):
        print(f"{name}: {state[name]}")
    halves = [{"source": SOURCE[:1000]}, {"source": SOURCE[1000:]}]
    for state in review.run_batch(halves, num_threads=2):
        print(f"batch: {state['summary']} -- {state['subject']}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
