"""``sglang-ext-bench COMMAND --help`` prints options. For commands that start servers it is quick: it loads neither PyTorch nor SGLang."""

import ast
import subprocess
import sys

from sglang_ext_bench.__main__ import COMMANDS

# Commands without servers. Their help may load PyTorch, so they come last: packages stay loaded.
HEAVY = ("acceptance.", "kernels.", "links.", "packs.", "pages.manual")
# Source of a process that prints, for each command, the heavy packages that are loaded after its help and whether it printed options.
SHOW_ALL = f"""
import contextlib, io, sys
from sglang_ext_bench.__main__ import COMMANDS, main
found = {{}}
for name in sorted(COMMANDS, key=lambda name: COMMANDS[name].module.startswith({HEAVY})):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([name, "--help"])
    found[name] = (sorted({{"torch", "sglang", "transformers", "triton"}} & sys.modules.keys()), "options:" in printed.getvalue())
print(found)
"""


def test_help_of_commands_with_servers_loads_neither_pytorch_nor_sglang() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW_ALL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = ast.literal_eval(done.stdout)
    assert all(printed for _, printed in found.values())
    assert not {name: loaded for name, (loaded, _) in found.items() if loaded and not COMMANDS[name].module.startswith(HEAVY)}
