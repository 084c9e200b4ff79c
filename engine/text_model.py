"""
The part of a model that text passes through. A checkpoint with towers for images or sound, such as Gemma 3
from 4b, is trained on text alone: its towers keep their weights.
"""

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM,
    AutoModelForImageTextToText, PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D


def text_model(model: PreTrainedModel):
    """Return the module with the layers for text: the model without its head and towers."""
    has_towers = model.config.get_text_config() is not model.config
    return model.get_decoder() if has_towers else model.base_model


def auto_class(architecture):
    """Return the class of transformers that loads a configuration's model. Mistral 3 has no text class."""
    kind = type(architecture)
    with_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers, as transformers marks them."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def freeze_towers(model: PreTrainedModel) -> None:
    """Exclude what text does not pass through from training: no gradients, no optimiser state, no decay."""
    if text_model(model) is model.base_model:             # there are no towers
        return
    parts = text_model(model), model.get_input_embeddings(), model.get_output_embeddings()
    used = {parameter for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in used)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained: those of the text model, or an adapter's."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def has_adapter(model: PreTrainedModel) -> bool:
    """Return True if an adapter is trained instead of the weights."""
    return any(hasattr(module, "lora_A") for module in model.modules())


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the text model's linear layers, without the head and without routers of experts."""
    inside = next(name for name, module in model.named_modules() if module is text_model(model))
    return [
        name for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name.startswith(f"{inside}.") and "router" not in name
    ]


def has_experts(model: PreTrainedModel) -> bool:
    """Return True if layers send each token to a few of many experts, as transformers names them."""
    return any("Experts" in type(module).__name__ for module in model.modules())
