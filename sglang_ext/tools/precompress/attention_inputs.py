"""Records the inputs of a transformers model's attention layers while the model runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from sglang_ext.tools.precompress import PrecompressError


class AttentionInputs:
    """The hidden states that attention layers read, after the norm before them.

    Attributes:
        positions: int64 [samples], ascending: tokens whose states are kept, counted over all forwards.
        norms: For each layer, float32 [tokens of the last forward], norms of its states.
    """

    def __init__(self, layers: int, positions: torch.Tensor) -> None:
        self.positions = positions
        self.norms: list[torch.Tensor | None] = [None] * layers
        self._kept: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._seen = [0] * layers

    @contextmanager
    def record_inputs(self, model: PreTrainedModel) -> Iterator[None]:
        """Record the forwards of ``model``, of one sequence each, inside this context.

        Raises:
            PrecompressError: The model's attention layers are not found.
        """
        layers = attention_layers(model)
        if [layer.layer_idx for layer in layers] != list(range(len(self.norms))):
            raise PrecompressError(
                f"{type(model).__name__} has {len(layers)} attention layers that are known as such, its config says "
                f"{len(self.norms)}: use a decoder whose layers all have attention"
            )
        hooks = [layer.register_forward_pre_hook(self._see, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def kept(self) -> torch.Tensor:
        """States at :attr:`positions`: [layers, samples, hidden_size], in the model's dtype, on the CPU."""
        return torch.stack([torch.cat(of_layer) for of_layer in self._kept])

    def _see(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        (states,) = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layer = module.layer_idx
        self.norms[layer] = states.float().norm(dim=-1)
        begin, self._seen[layer] = self._seen[layer], self._seen[layer] + len(states)
        mine = self.positions[(self.positions >= begin) & (self.positions < self._seen[layer])] - begin
        self._kept[layer].append(states[mine.to(states.device)].cpu())


def attention_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that call attention functions, by layer. Such modules have both attributes, which attention functions read."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")]


def output_norms(module: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    """The weight of values in a layer's output, the norm of ``W_O v``: float32 [kv_heads, group, tokens].

    Args:
        module: The attention layer.
        values: [kv_heads, tokens, head_dim].

    Raises:
        PrecompressError: The linear map of its output is not found.
    """
    kv_heads, _, dim = values.shape
    width = kv_heads * module.num_key_value_groups * dim
    # The output's map comes last. A map of queries may have the same shape.
    maps = [child for child in module.children() if isinstance(child, torch.nn.Linear) and child.in_features == width]
    if not maps:
        raise PrecompressError(
            f"{type(module).__name__} has no linear map of its {width} outputs, which KVzip+ weighs values by: use --target kvzip"
        )
    weight = maps[-1].weight.float().unflatten(1, (kv_heads, -1, dim))
    gram = torch.einsum("jhgd,jhge->hgde", weight, weight)
    values = values.float()
    return torch.einsum("hgde,htd,hte->hgt", gram, values, values).clamp(min=0).sqrt()
