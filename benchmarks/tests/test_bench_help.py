"""``sglang-ext-bench COMMAND --help`` prints options. For commands that start servers it is quick: it loads neither PyTorch nor SGLang."""

import ast
import subprocess
import sys

import pytest

from sglang_ext_bench.__main__ import COMMANDS, main

# Commands without servers. Their help may load PyTorch, which this process has loaded already.
HEAVY = [name for name, command in COMMANDS.items() if command.module.startswith(("acceptance.", "kernels.", "links.", "packs.", "pages.manual"))]
# Source of a process that prints, for each other command, the heavy packages that are loaded after its help and whether it printed options.
SHOW_OTHERS = f"""
import contextlib, io, sys
from sglang_ext_bench.__main__ import COMMANDS, main
found = {{}}
for name in COMMANDS.keys() - set({HEAVY}):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([name, "--help"])
    found[name] = (sorted({{"torch", "sglang", "transformers", "triton"}} & sys.modules.keys()), "options:" in printed.getvalue())
print(found)
"""


def test_help_of_commands_with_servers_loads_neither_pytorch_nor_sglang() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW_OTHERS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = ast.literal_eval(done.stdout)
    assert found and all(printed for _, printed in found.values())
    assert not {name: loaded for name, (loaded, _) in found.items() if loaded}


@pytest.mark.parametrize("name", HEAVY)
def test_help_of_other_commands_prints_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert "options:" in capsys.readouterr().out
