"""How a long command ends that leaves whole files behind, and is run again for the rest."""

from collections.abc import Callable

from rich.console import Console


def exit_code(name: str, work: Callable[[], None], refused: tuple[type[Exception], ...], console: Console) -> int:
    """Do ``work``: 0 when it is done, 2 for one of ``refused``, which is shown, 130 when it was interrupted."""
    try:
        work()
    except refused as error:
        console.print(f"{name}: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(f"{name}: interrupted; run it again for the rest")
        return 130
    return 0
