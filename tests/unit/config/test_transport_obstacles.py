"""What keeps a transport of KV from working here is said before a server starts: its name, its package, its libraries."""

import importlib
import sys
from importlib.util import find_spec

import pytest
from sglang.srt.server_args import DISAGG_TRANSFER_BACKEND_CHOICES

from sglang_ext.tools import server_flags
from sglang_ext.tools import CommandError
from sglang_ext.config import disaggregation_options


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Installs a module of a package, with its source. No package of a transport is installed before."""
    modules = {module for module, _ in disaggregation_options.TRANSPORTS.values()}
    for name in modules | {module.partition(".")[0] for module in modules}:
        # Python does not look for a module of this value.
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.syspath_prepend(tmp_path)

    def install(module, source=""):
        file = tmp_path.joinpath(*module.split("."), "__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        for name in (module, module.partition(".")[0]):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    return install


def check(**flags):
    """Check flags as SGLang's parser reads them, in this process."""
    server_flags.check("m", {role: ("--disaggregation-mode", role, *each) for role, each in flags.items()})


def over(backend):
    return (f"--disaggregation-transfer-backend={backend}",)


@pytest.mark.parametrize("backend", disaggregation_options.TRANSPORTS)
def test_a_transport_works_where_its_package_is_there_and_loads(install, backend):
    module = disaggregation_options.TRANSPORTS[backend][0]
    assert f"the package {module.split('.')[0]} is not installed: " in disaggregation_options.transport_obstacle(backend)
    install(module)
    assert disaggregation_options.transport_obstacle(backend) is None
    for error in (ImportError("librdmacm.so.1: cannot open\nshared object file"), OSError("libnuma.so.1: no such file")):
        install(module, f"raise {error!r}")
        said = disaggregation_options.transport_obstacle(backend)
        assert said.startswith(f"{module} does not load ({type(error).__name__}: lib") and "\n" not in said and "use progressive" in said


def test_each_of_sglangs_transports_is_known():
    assert set(disaggregation_options.TRANSPORTS) | {disaggregation_options.FAKE} == set(DISAGG_TRANSFER_BACKEND_CHOICES) - {"progressive"}
    assert disaggregation_options.transport_obstacle("progressive") is None


@pytest.mark.parametrize("backend", ["nixl", "mooncake_tcp", "mori"])
def test_a_server_over_a_transport_that_is_not_installed_is_refused(install, backend):
    with pytest.raises(CommandError, match=f"the server decode cannot start: --disaggregation-transfer-backend is {backend}: the package"):
        check(prefill=over("progressive"), decode=over(backend))
    server_flags.check("m", {"alone": over(backend)})


def test_a_transport_that_is_none_is_refused(install):
    with pytest.raises(CommandError, match="the server prefill cannot start: --disaggregation-transfer-backend is fake: it moves no KV"):
        check(prefill=over("fake"))
    with pytest.raises(CommandError, match="the server prefill cannot start: .*invalid choice: 'carrier' .*progressive"):
        check(prefill=over("carrier"))


def test_the_last_of_two_flags_counts_and_both_servers_name_the_same(install):
    install("nixl._api")
    check(prefill=(*over("mooncake"), *over("nixl")), decode=over("nixl"))
    differ = "--disaggregation-transfer-backend is nixl of the server prefill and progressive of the server decode"
    with pytest.raises(CommandError, match=differ):
        check(prefill=over("nixl"), decode=over("progressive"))


def test_what_this_machine_has_is_found():
    """Nothing stands in for the import here."""
    lacks = find_spec("nixl") is None
    assert ("not installed" in (disaggregation_options.transport_obstacle("nixl") or "")) == lacks


def test_a_prefill_and_a_decode_server_whose_codes_would_not_fit_are_refused():
    flags = (*over("progressive"), "--kv-mode", "lossy", "--kv-compressor", "hack")
    check(prefill=flags, decode=(*flags, "--kv-bits", "4"))
    with pytest.raises(CommandError, match="the servers prefill and decode differ in codes.bits: give both servers the same .*--kv-bits"):
        check(prefill=flags, decode=(*flags, "--kv-bits", "2"))
    with pytest.raises(CommandError, match="differ in codes.prefill"):
        check(prefill=(*flags, "--kv-prefill", "quantized"), decode=flags)
