"""Methods of users' own, named by file or module and by class: served like the catalogue's, or refused with the reason."""

from types import SimpleNamespace

import pytest
import torch
from argument_helpers import arguments
from test_compressed_kv import make_views

from sglang_ext_bench.options import file_name
from sglang_ext.config import method_options, request_params
from sglang_ext.core import OptionError, RequestState
from sglang_ext.managers.spec_decode.request_states import meta_info_fields, write_counters
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressors import catalogue

GOOD = '''
from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressors import Always, Compressor, ContextKV, LayerKV, Quantizer, register
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid


@dataclass(frozen=True)
class {prefix}Norm(Compressor):
    recent: int = 16

    def scores(self, layer: LayerKV) -> torch.Tensor:
        return -layer.keys.float().norm(dim=-1).t()


@register("{name}")
@dataclass(frozen=True)
class Named{prefix}(Compressor):
    def scores(self, layer: LayerKV) -> torch.Tensor:
        return layer.values.float().norm(dim=-1).t()


@dataclass(frozen=True)
class {prefix}Halves(Quantizer):
    def key_grid(self, dim: int) -> Grid:
        return Grid(1, dim)

    def value_grid(self, dim: int) -> Grid:
        return Grid(1, dim // 2)


class Scoreless(Compressor):
    pass


class Demanding(Compressor):
    def __init__(self, folder):
        self.folder = folder

    def scores(self, layer):
        return None


@dataclass(frozen=True)
class Misnamed(Compressor):
    name: str = "another"

    def scores(self, layer):
        return None


class Reading({prefix}Norm):
    reads = "a folder"


@dataclass(frozen=True)
class Failing({prefix}Norm):
    def for_context(self, context):
        raise IndexError("out of range")


def a_function():
    pass
'''


pytestmark = pytest.mark.usefixtures("own_methods")


def written(folder, prefix, text=GOOD):
    """A file of methods."""
    path = folder / "my_method.py"
    path.write_text(text.format(prefix=prefix, name=f"named-{prefix.lower()}"))
    return str(path)


def test_a_class_that_drops_tokens_serves_alone_and_packed(tmp_path):
    folder = tmp_path / "c++"
    folder.mkdir()
    path = written(folder, "First")
    assert catalogue.parse(f"{path}:FirstNorm") == ("FirstNorm", None)
    assert catalogue.parse(f"{path}:NamedFirst") == ("named-first", None), "the name that it registers itself with"
    assert catalogue.parse(f"{path}:FirstNorm+kivi") == ("FirstNorm", "kivi")
    assert catalogue.parse(f"{path}:FirstHalves") == (None, "FirstHalves")
    assert catalogue.parse(f"snapkv+{path}:FirstHalves") == ("snapkv", "FirstHalves")
    assert catalogue.parse(f"{path}:FirstNorm+{path}:FirstHalves") == ("FirstNorm", "FirstHalves")
    made = catalogue.method(f"{path}:FirstNorm+{path}:FirstHalves", 2)
    assert (made.compressor.name, made.compressor.recent, made.quantizer.bits) == ("FirstNorm", 16, 2)
    assert {"FirstNorm", "named-first"} < set(catalogue.dropping()) - set(catalogue.online()) and "FirstHalves" in catalogue.packing()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package of methods; its name."""
    name = f"own_methods_{tmp_path.name}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "norms.py").write_text(GOOD.format(prefix="Tenth", name="named-tenth"))
    (folder / "broken.py").write_text("\n1 / 0\n")
    (folder / "lacking.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_class_of_an_installed_module_serves_alone_and_packed(package):
    assert catalogue.parse(f"{package}.norms:TenthNorm") == ("TenthNorm", None)
    assert catalogue.parse(f"{package}.norms:NamedTenth") == ("named-tenth", None), "the name that it registers itself with"
    assert catalogue.parse(f"{package}.norms:TenthNorm+kivi") == ("TenthNorm", "kivi")
    assert catalogue.parse(f"snapkv+{package}.norms:TenthHalves") == ("snapkv", "TenthHalves")
    assert catalogue.method(f"{package}.norms:TenthNorm").compressor.recent == 16
    assert not {"TenthNorm", "named-tenth"} & set(catalogue.builtin_names(catalogue.dropping())), "messages list the built-in ones"
    assert catalogue.parse("sglang_ext.mem_cache.compressors.attention_scores:SnapKV") == ("snapkv", None), "a built-in one keeps its name"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package.norms:Norm", "there is no module no_such_package: install its package where the server runs, or add its folder"),
        ("{package}.missing:Norm", "there is no module own_methods_.*.missing: install"),
        ("{package}.broken:Norm", "module own_methods_.*.broken raised ZeroDivisionError: division by zero: correct the module"),
        ("{package}.lacking:Norm", "lacking raised ModuleNotFoundError: No module named 'no_such_package': correct the module"),
        ("{package}.norms:Nothing", "Nothing is not in .*norms.py: name one that is: TenthNorm, NamedTenth, TenthHalves"),
        ("{package}.norms:a_function", "a_function is not a method: name one"),
        ("norms:TenthNorm", "allowed: one that drops tokens .* of your own, as in ./my_method.py:KeyNorm or package.module:KeyNorm"),
    ],
)
def test_what_is_no_method_of_a_module_is_refused_with_the_reason(package, value, message):
    named = value.format(package=package)
    for _ in range(2):
        with pytest.raises(OptionError, match=message) as raised:
            catalogue.parse(named, "--kv-compressor")
        assert f"--kv-compressor is {named!r}" in str(raised.value)


def test_requests_may_ask_for_it_as_it_is_told(tmp_path):
    path = written(tmp_path, "Ninth")
    args = arguments(kv_compressor=f"{path}:NinthNorm+kivi", kv_more_compressors=f"{path}:NinthNorm:0.5,snapkv")
    method_options.resolve_methods(args)
    names = [offer.public_name for offer in method_options.offered_methods(args)]
    assert names == ["NinthNorm+kivi", "NinthNorm:0.5", "snapkv"]
    for place, asked in enumerate((f"{path}:NinthNorm+kivi", "NinthNorm:.50", "snapkv")):
        assert [offer.is_named(asked) for offer in method_options.offered_methods(args)] == [each == place for each in range(3)]
    for name in names:
        request_params.check_params(args, {"kv_compressor": name})
    with pytest.raises(ValueError, match=r"'NinthNorm'; this server compresses with NinthNorm\+kivi, NinthNorm:0.5, snapkv: ask"):
        request_params.check_params(args, {"kv_compressor": "NinthNorm"})


def test_requests_ask_for_it_by_what_the_flag_says_and_meta_info_tells_its_name(tmp_path):
    path = written(tmp_path, "Second")
    args = arguments(kv_compressor=f"{path}:SecondNorm", kv_more_compressors=f"{path}:SecondNorm:0.5, snapkv+kivi:0.125")
    method_options.resolve_methods(args)
    first, half, packed = method_options.offered_methods(args)
    assert (first.budget, half.budget, packed.budget) == (0.25, 0.5, 0.125)
    assert half.is_named(f"{path}:SecondNorm:.50") and not half.is_named(f"{path}:SecondNorm")
    assert (half.drop_method, half.quant_method, half.suffix) == ("SecondNorm", None, ":0.5")
    method = CompressionMethod(catalogue.create("SecondNorm"), 0.5, PlainSlots(1), half.name, "", half.suffix)
    req, helper = SimpleNamespace(), SimpleNamespace(name="")
    for chooser in (method.compressor, helper):
        state = RequestState("rid", 1, seed=0, method=1)
        state.compressor = catalogue.number(method.full_name(chooser).partition(":")[0])
        write_counters(req, state)
        told = meta_info_fields(req.spec_cap_lens_histogram, [offer.suffix for offer in (first, half, packed)])
        assert told["kv_compressor"] == "SecondNorm:0.5"


def test_one_method_by_two_paths_is_one(tmp_path):
    path = written(tmp_path, "Sixth")
    again = path.replace("my_method.py", "./my_method.py")
    with pytest.raises(OptionError, match="again, with a budget of 0.25"):
        method_options.resolve_methods(arguments(kv_compressor=f"{path}:SixthNorm", kv_more_compressors=f"{again}:SixthNorm"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("snapkv", ("snapkv", None)), ("snapkv:.5", ("snapkv", ".5")), ("kivi:2", ("kivi", "2")),
        ("./a.py:K", ("./a.py:K", None)), ("./a.py:K:0.5", ("./a.py:K", "0.5")), ("./a.py:K+kivi:2", ("./a.py:K+kivi", "2")),
        ("a.b:K", ("a.b:K", None)), ("a.b_1.c:K:0.5", ("a.b_1.c:K", "0.5")), ("a.b:K+kivi:2", ("a.b:K+kivi", "2")),
        ("snapkv+a.b:Q:4", ("snapkv+a.b:Q", "4")), ("a.b:K+c.py:Q:1", ("a.b:K+c.py:Q", "1")), ("a.py:0.5", ("a.py", "0.5")),
        ("a.py:K+b.py:Q", ("a.py:K+b.py:Q", None)), ("a.py:K+b.py:Q:1", ("a.py:K+b.py:Q", "1")), ("snapkv+b.py:Q:4", ("snapkv+b.py:Q", "4")),
    ],
)  # fmt: skip
def test_what_stands_behind_a_method_begins_after_the_last_class(text, parts):
    assert catalogue.split(text) == parts


def test_what_lies_beside_a_file_may_be_imported(tmp_path):
    (tmp_path / "beside_my_method.py").write_text("RECENT = 3\n")
    path = written(tmp_path, "Seventh", "from beside_my_method import RECENT\n" + GOOD.replace("16", "RECENT"))
    assert catalogue.method(f"{path}:SeventhNorm").compressor.recent == 3


def test_what_it_raises_while_it_serves_costs_its_copies_alone(tmp_path):
    compressed_kv = make_views(budget=0.5, compressor=catalogue.method(f"{written(tmp_path, 'Eighth')}:Failing").compressor)
    assert not compressed_kv.compress(1, 64) and compressed_kv.is_refused(1)


def test_a_benchmarks_log_lies_in_its_folder():
    assert file_name("lossy-/home/me/my_method.py:KeyNorm-0.25") == "lossy--home-me-my_method.py-KeyNorm-0.25"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{folder}/missing.py:Norm", "there is no file .*missing.py: pass PATH.py:CLASS"),
        ("{path}:Nothing", "Nothing is not in .*my_method.py: name one that is: ThirdNorm, NamedThird, ThirdHalves, Scoreless, Demanding, "),
        ("{path}:a_function", "a_function is not a method: name one"),
        ("{path}:Scoreless", "Scoreless has no scores: add it"),
        ("{path}:Demanding", "Demanding cannot be created: TypeError: .*'folder': give its parameters defaults"),
        ("{path}:Misnamed", "Misnamed objects are called 'another': set `name` to that of the class, 'Misnamed'"),
        ("{path}:Reading", "Reading reads a folder, which only built-in methods may do: leave that out"),
        ("{odd}:Norm", "raised ValueError: 'an:odd' cannot name a method: use letters, digits, - and _"),
        ("{halfway}:Norm", "halfway.py, line 5 raised ZeroDivisionError"),
        ("{broken}:Norm", r"broken.py, line 2 raised ZeroDivisionError: division by zero: correct the file"),
        ("{taken}:Norm", "raised ValueError: there is a method 'snapkv' already: give this one another name"),
    ],
)
def test_what_is_no_method_is_refused_with_the_reason(tmp_path, value, message):
    files = {"path": written(tmp_path, "Third"), "broken": tmp_path / "broken.py", "taken": tmp_path / "taken.py"}
    files["broken"].write_text("\n1 / 0\n")
    files["taken"].write_text("from sglang_ext.mem_cache.compressors import *\n@register('snapkv')\nclass Norm(Compressor):\n    pass\n")
    text = "from sglang_ext.mem_cache.compressors import *\n@register('{}')\nclass Norm(Compressor):\n    def scores(self, layer): pass\n"
    for name, registered in (("odd", "an:odd"), ("halfway", "half")):
        files[name] = tmp_path / f"{name}.py"
        files[name].write_text(text.format(registered) + ("1 / 0\n" if name == "halfway" else ""))
    named = value.format(folder=tmp_path, **files)
    for _ in range(2):
        with pytest.raises(OptionError, match=message) as raised:
            catalogue.parse(named, "--kv-compressor")
        assert f"--kv-compressor is {named!r}" in str(raised.value)


def test_a_second_class_of_the_same_name_is_refused(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir(), second.mkdir()
    text = GOOD.replace('@register("{name}")\n', "")
    assert catalogue.parse(f"{written(first, 'Fourth', text)}:FourthNorm") == ("FourthNorm", None)
    with pytest.raises(OptionError, match="there is a method 'FourthNorm' already"):
        catalogue.parse(f"{written(second, 'Fourth', text)}:FourthNorm")


def test_its_scores_are_those_of_the_class(tmp_path):
    method = catalogue.method(f"{written(tmp_path, 'Fifth')}:FifthNorm").compressor
    keys = torch.randn(7, 2, 4)
    layer = type("Layer", (), {"keys": keys})()
    assert torch.equal(method.scores(layer), -keys.norm(dim=-1).t())
