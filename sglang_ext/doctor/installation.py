"""Checks of the installation: Python, the packages, and the entry points with which SGLang finds this one. Defines :class:`Check`."""

import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

SGLANG_VERSION = "0.5.17"
INSTALL = "run `make install`, or `pip install -e .` in the environment that serves"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was checked.
        ok: Whether sglang-ext can serve with what was found.
        found: What was found.
        remedy: What to do if not ``ok``. Empty if it is.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""


def make_check(name: str, ok: bool, found: str, remedy: str) -> Check:
    """Create a check that shows its remedy only if it fails."""
    return Check(name, ok, found, "" if ok else remedy)


def one_line(error: Exception) -> str:
    """An error in one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


PYTHON_VERSIONS = ((3, 11), (3, 12))
PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "sglang_ext.plugin:register"
PLATFORM_GROUP, PLATFORM = "sglang.srt.platforms", "sglang_ext.platforms:activate"


def check_python(running: tuple[int, int] = sys.version_info[:2]) -> Check:
    """Check that SGLang's packages are pinned for this Python."""
    supported = [".".join(map(str, version)) for version in PYTHON_VERSIONS]
    remedy = f"make the environment with Python {' or '.join(supported)}: `make install PYTHON=python3.11`"
    return make_check("Python", running in PYTHON_VERSIONS, ".".join(map(str, running)), remedy)


def package_version(package: str) -> str | None:
    """Version of an installed package. None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_sglang() -> Check:
    """Check that SGLang is installed, in the version that the hooks were written for."""
    found = package_version("sglang")
    remedy = f"install sglang=={SGLANG_VERSION}: `make install`"
    return make_check("SGLang", found == SGLANG_VERSION, found or "not installed", remedy)


def check_torch() -> Check:
    """Check that torch is installed. SGLang's requirements determine its version."""
    found = package_version("torch")
    return make_check("torch", found is not None, found or "not installed", INSTALL)


def check_entry_point(name: str, group: str, value: str) -> Check:
    """Check that SGLang finds one of our entry points."""
    known = [point.name for point in entry_points(group=group) if point.value == value]
    found = f"{known[0]} in {group}" if known else f"not in {group}"
    return make_check(name, bool(known), found, INSTALL)


def check_not_filtered() -> Check:
    """Check that SGLang's environment variables allow it to load the plugin."""
    ours = {point.name for point in entry_points(group=PLUGIN_GROUP) if point.value == PLUGIN}
    platforms = {point.name for point in entry_points(group=PLATFORM_GROUP) if point.value == PLATFORM}
    asked = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if asked and not asked & ours:
        found = f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves it out"
        return Check("plugin selection", False, found, "add sglang_ext to SGLANG_PLUGINS, or unset it")
    platform = os.environ.get("SGLANG_PLATFORM")
    if platform and platform not in platforms:
        found = f"SGLANG_PLATFORM={platform} leaves it out"
        return Check("plugin selection", False, found, "unset SGLANG_PLATFORM")
    return Check("plugin selection", True, "SGLang loads it")
