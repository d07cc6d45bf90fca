"""``sglang-ext-bench COMMAND --help`` prints options. For commands that start servers it is quick: it loads neither PyTorch nor SGLang."""

import ast
import subprocess
import sys

from sglang_ext_bench.__main__ import COMMANDS

# Source of a process that prints, for each command, the heavy packages that its help loaded and whether it printed options.
SHOW_ALL = """
import contextlib, io, sys
from sglang_ext_bench.__main__ import COMMANDS, main
found = {}
for name in COMMANDS:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([name, "--help"])
    found[name] = (sorted({"torch", "sglang", "transformers", "triton"} & sys.modules.keys()), "options:" in printed.getvalue())
print(found)
"""


def test_the_help_of_no_command_loads_pytorch_or_sglang() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW_ALL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = ast.literal_eval(done.stdout)
    assert all(printed for _, printed in found.values())
    heavy = ("acceptance.", "kernels.", "links.", "packs.")
    assert not {name: loaded for name, (loaded, _) in found.items() if loaded and not COMMANDS[name].module.startswith(heavy)}
