"""Methods of users' own, named by file and class: served like the catalogue's, or refused with the reason."""

import pytest
import torch
from argument_helpers import arguments

from sglang_ext.config import method_options
from sglang_ext.core import OptionError
from sglang_ext.managers import meta_info
from sglang_ext.mem_cache.compressors import catalogue, own_methods
from sglang_ext.mem_cache.compressors.contracts import registry

GOOD = '''
from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressors import Always, Compressor, ContextKV, LayerKV, Quantizer, register
from sglang_ext.mem_cache.compressed.formats.packed_layout import Grid


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


def a_function():
    pass
'''


@pytest.fixture(autouse=True)
def unregistered():
    """What a test registers is gone after it."""
    catalogue.dropping()
    registered = [(known, dict(known)) for known in (registry.COMPRESSORS, registry.QUANTIZERS)]
    yield
    for known, before in registered:
        known.clear()
        known.update(before)
    for cached in (catalogue.parse, catalogue._numbers, own_methods._registered, method_options._offers):
        cached.cache_clear()


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
    assert {"FirstNorm", "named-first"} < set(catalogue.online()) and "FirstHalves" in catalogue.packing()


def test_requests_ask_for_it_by_what_the_flag_says_and_meta_info_tells_its_name(tmp_path):
    path = written(tmp_path, "Second")
    args = arguments(kv_compressor=f"{path}:SecondNorm", kv_more_compressors=f"{path}:SecondNorm:0.5, snapkv+kivi:0.125")
    method_options.resolve(args)
    first, half, packed = method_options.offers(args)
    assert (first.budget, half.budget, packed.budget) == (0.25, 0.5, 0.125)
    assert half.is_called(f"{path}:SecondNorm:.50") and not half.is_called(f"{path}:SecondNorm")
    assert (half.drops, half.packs, half.suffix) == ("SecondNorm", None, ":0.5")
    number = catalogue.number("SecondNorm")
    told = meta_info.describe([1, 2, 1, 0, number, 1, 0], [offer.suffix for offer in (first, half, packed)])
    assert told["kv_compressor"] == "SecondNorm:0.5"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{folder}/missing.py:Norm", "there is no file .*missing.py: pass PATH.py:CLASS"),
        ("{path}:Nothing", "Nothing is not in it: name one that is there: ThirdNorm, NamedThird, ThirdHalves, Scoreless, Demanding"),
        ("{path}:a_function", "a_function is no method: name one"),
        ("{path}:Scoreless", "Scoreless has no scores: add it"),
        ("{path}:Demanding", "Demanding cannot be made without folder: give it defaults"),
        ("{broken}:Norm", r"broken.py, line 2 raised ZeroDivisionError: division by zero: correct the file"),
        ("{taken}:Norm", "raised ValueError: there is a method 'snapkv' already: give this one another name"),
    ],
)
def test_what_is_no_method_is_refused_with_the_reason(tmp_path, value, message):
    files = {"path": written(tmp_path, "Third"), "broken": tmp_path / "broken.py", "taken": tmp_path / "taken.py"}
    files["broken"].write_text("\n1 / 0\n")
    files["taken"].write_text("from sglang_ext.mem_cache.compressors import *\n@register('snapkv')\nclass Norm(Compressor):\n    pass\n")
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
