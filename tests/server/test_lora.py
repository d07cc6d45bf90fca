"""LoRA: drafts and verifications take the adapter of their request; answers are stock's."""

import concurrent.futures
import json

import pytest
from servers import greedy

pytestmark = pytest.mark.server

MODULES = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "late": ("q_proj", "v_proj", "down_proj"),
}
RANKS = {"attention": 8, "mlp": 4, "late": 6}
MIXED = ("attention", None, "mlp", "attention")
# With the base model's none, four adapters for the three places of a batch.
CHANGED = ("late", "mlp", None, "attention")
AGAIN = ("late",)
# Random adapters of this strength change the answers and leave them text.
STRENGTH = 0.1


def write_adapter(folder, config, name):
    """A random PEFT adapter for each layer of a Llama model."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    sizes = {"k_proj": (hidden, kv), "v_proj": (hidden, kv), "down_proj": (inner, hidden)}
    sizes |= dict.fromkeys(("gate_proj", "up_proj"), (hidden, inner))
    rank, modules = RANKS[name], MODULES[name]
    noise = torch.Generator().manual_seed(len(name))
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module in modules:
            parent = "mlp" if module in MODULES["mlp"] else "self_attn"
            prefix = f"base_model.model.model.layers.{layer}.{parent}.{module}"
            wide, out = sizes.get(module, (hidden, hidden))
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, wide, generator=noise) * wide**-0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, generator=noise) * STRENGTH * rank**-0.5
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    about |= {"lora_dropout": 0.0, "bias": "none", "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def adapters(model_config, tmp_path_factory):
    """The folder of each adapter."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, model_config, name) for name in MODULES}


def ask(server, ids, names):
    """The answers to one prompt under each adapter, all in one batch."""

    def generate(name):
        return server.ask(input_ids=ids, **greedy(20), **({"lora_path": name} if name else {}))

    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(generate, names))


def use(server, prompts, late):
    """Two adapters and the base model in one batch; then one more adapter, loaded and unloaded."""
    mixed = ask(server, prompts[0][:160], MIXED)
    loaded = server.request("load_lora_adapter", {"lora_name": "late", "lora_path": str(late)})
    changed = ask(server, prompts[1][:160], CHANGED)
    unloaded = server.request("unload_lora_adapter", {"lora_name": "late"})
    assert loaded["success"] and unloaded["success"]
    # SGLang loads an adapter that it knows again when a request names it.
    return {"mixed": mixed, "changed": changed, "again": ask(server, prompts[1][:160], AGAIN)}


@pytest.fixture(scope="module")
def answers(launch, prompts, adapters):
    """What stock and what verified answer: ``(stock, verified)``, each by batch."""
    flags = ["--lora-paths", *(f"{name}={adapters[name]}" for name in ("attention", "mlp"))]
    flags += ["--max-lora-rank", "8", "--max-loras-per-batch", "3"]
    flags += ["--lora-target-modules", *MODULES["attention"], *MODULES["mlp"]]
    verified = ["--kv-mode", "verified", "--kv-budget", "0.25", "--kv-draft-length", "4"]
    return [use(launch(*flags, *mode), prompts, adapters["late"]) for mode in ([], verified)]


@pytest.mark.parametrize(("batch", "names"), [("mixed", MIXED), ("changed", CHANGED), ("again", AGAIN)])
def test_each_request_has_stocks_answer_with_its_adapter(answers, batch, names):
    stock, verified = (side[batch] for side in answers)
    outputs = [r["output_ids"] for r in verified]
    assert outputs == [r["output_ids"] for r in stock]
    assert len(set(map(tuple, outputs))) == len(set(names)), "each adapter has an answer of its own"
    for answer in verified:
        about = answer["meta_info"]
        assert about["kv_drafts"] > 0 and about["kv_verifies"] > 0 and about["kv_fallback"] is None
