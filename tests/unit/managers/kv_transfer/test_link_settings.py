"""Peers with other settings are refused by the name of the first field that differs."""

import msgspec
import pytest
from link_helpers import SETTINGS

from sglang_ext.managers.kv_transfer.wire import LinkSettings, settings_mismatch, version_mismatch

OTHER = {
    "model_key": "other", "pool_dtype": "float16", "layers": 31, "kv_heads": 1, "key_dim": 128, "value_dim": 32, "page_size": 128,
    "codec": "plain", "codec_version": 2, "codec_options": {"sinks": 0, "wide": False}, "reference": "exact", "tp_rank": 1, "tp_size": 2,
}  # fmt: skip


def test_equal_settings_are_not_refused():
    assert settings_mismatch(SETTINGS, msgspec.msgpack.decode(msgspec.msgpack.encode(SETTINGS), type=LinkSettings)) is None
    assert version_mismatch(1, 1) is None


@pytest.mark.parametrize("field", LinkSettings.__struct_fields__)
def test_the_field_that_differs_is_named_with_both_values_and_a_remedy(field):
    peer = msgspec.structs.replace(SETTINGS, **{field: OTHER[field]})
    told = settings_mismatch(SETTINGS, peer)
    assert told.startswith(f"{field} is {getattr(SETTINGS, field)!r} at the receiver and {OTHER[field]!r} at the sender; ")
    assert len(told.rsplit("; ")[-1]) > 10


def test_of_several_fields_the_first_is_named_and_what_follows_from_others_last():
    peer = msgspec.structs.replace(SETTINGS, page_size=1, kv_heads=77, tp_size=8)
    assert settings_mismatch(SETTINGS, peer).startswith("kv_heads")
    assert settings_mismatch(SETTINGS, msgspec.structs.replace(SETTINGS, page_size=1, tp_size=8)).startswith("tp_size")


def test_of_options_those_alone_are_shown_that_differ():
    ours, theirs = (msgspec.structs.replace(SETTINGS, codec_options={"bits": 4, **more}) for more in ({"sinks": 4}, {"codes.bits": 2}))
    told = settings_mismatch(ours, theirs)
    assert told.startswith("codec_options is {'codes.bits': None, 'sinks': 4} at the receiver and {'codes.bits': 2, 'sinks': None} at the sender")


def test_another_version_is_refused_with_both():
    assert version_mismatch(1, 2).startswith("protocol is 1 at the receiver and 2 at the sender")
