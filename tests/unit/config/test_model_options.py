"""What of a model shows only after SGLang resolved its defaults."""

from types import SimpleNamespace

import pytest

from sglang_ext.config import model_options
from sglang_ext.core import OptionError


def resolved(query_heads, kv_heads, **changes):
    """Arguments as SGLang leaves them, for a model of its own that is supported in every other way."""
    text = SimpleNamespace(sliding_window=None)
    config = SimpleNamespace(
        hf_text_config=text, attention_arch=None, is_multimodal=False, is_generation=True, quantization=None,
        get_num_attention_heads=lambda ranks: query_heads // ranks, get_num_kv_heads=lambda ranks: max(1, kv_heads // ranks),
    )  # fmt: skip
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="disabled"))
    plain = dict(
        kv_mode="verified", enable_deterministic_inference=True, tp_size=1, model_path="a-model", attention_backend="triton",
        prefill_attention_backend=None, decode_attention_backend=None, cuda_graph_config=graphs,
    )  # fmt: skip
    return SimpleNamespace(**{**plain, **changes}, get_model_config=lambda: config)


@pytest.mark.parametrize(("heads", "ranks"), [((8, 8), 1), ((8, 8), 2), ((16, 2), 16)], ids=["MHA", "MHA on two", "few KV heads"])
def test_in_deterministic_mode_one_query_head_a_kv_head_is_refused(heads, ranks):
    message = f"--model-path a-model, --tp-size {ranks}: a rank has {heads[0] // ranks} query heads and as many KV heads; .*full"
    with pytest.raises(OptionError, match=message):
        model_options.check_model(resolved(*heads, tp_size=ranks))


@pytest.mark.parametrize(
    ("heads", "changes"),
    [
        ((8, 4), {}), ((16, 2), {"tp_size": 8}), ((8, 8), {"enable_deterministic_inference": False}),
        ((8, 8), {"attention_backend": "torch_native"}), ((8, 8), {"kv_mode": "lossy"}),
    ],
    ids=["two query heads", "two on a rank", "not deterministic", "on a CPU", "lossy"],
)  # fmt: skip
def test_others_start(heads, changes):
    model_options.check_model(resolved(*heads, **changes))
