"""What the program uses of Python, torch, transformers and peft that they may change without notice, and what they have deprecated.

A line of the tables says what to do without it, if there is something. The last tests find what is in no table.
"""

import ast
import importlib
import inspect

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, build_gpt2, run_folder
from project_files import ROOT, modules_of_the_program
from transformers import core_model_loading

from engine import sharding
from engine.recomputation import layers_of
from engine.text_model import linear_layers

# torch.ops.aten.NAME of engine/attention_kernels.py, which engine/test_attention_kernels.py and test_prefix_attention.py call. Without
# one: choose_kernel returns Chunked.
OPERATORS = {
    f"_scaled_dot_product_{name}{backward}" for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
    for backward in ("", "_backward")}
FUNCTIONS = {                   # module.NAME -> parameters
    "torch.distributed.distributed_c10d._get_default_store": "",                 # without: every rank prints the last line
    "transformers.core_model_loading.revert_weight_conversion": "model, state_dict",         # vLLM; save_pretrained calls it too
    "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers": "peft_config, model, conversions",
    "atexit._run_exitfuncs": "",
}
ATTRIBUTES = {"_attn_implementation", "_is_hf_initialized", "_actions", "_negative_number_matcher"}      # a test each, below
DOCUMENTED = {"_exit", "_getframe"}                       # of os and of sys
MODULES = {                     # undocumented; a test of what is imported from each is above or below
    "transformers.core_model_loading", "transformers.modeling_layers", "transformers.pytorch_utils",
    "peft.utils.transformers_weight_conversion",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(module), function, None)
    assert found is not None, f"{name} is gone"
    if module != "atexit":                                # in C, without a signature before Python 3.13
        assert ", ".join(inspect.signature(found).parameters) == FUNCTIONS[name]


def test_attn_implementation_is_what_a_layer_reads_and_sets_that_of_the_parts():
    config = transformers.Gemma3Config(text_config={}, vision_config={})
    config._attn_implementation = "eager"
    config._attn_implementation = "prefix_attention"
    assert config.text_config._attn_implementation == config.vision_config._attn_implementation == "prefix_attention"
    assert "config._attn_implementation" in inspect.getsource(transformers.models.gemma3.modeling_gemma3.Gemma3Attention.forward)


def test_is_hf_initialized_marks_each_weight_that_was_read_when_a_module_gets_it(tmp_path):
    ARCHITECTURES["llama"]().save_pretrained(tmp_path)
    read = set()

    def note(module, name, weight):
        if getattr(weight, "_is_hf_initialized", False) and not weight.is_meta:
            read.add(weight)

    with torch.nn.modules.module.register_module_parameter_registration_hook(note):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read >= set(model.parameters())


def test_hf_deactivate_async_load_is_read_by_the_loader():
    found = '"HF_DEACTIVATE_ASYNC_LOAD"' in inspect.getsource(core_model_loading)
    assert found, "from_pretrained reads all weights ahead, into the memory of each process"


def test_gradient_checkpointing_layer_is_the_class_of_layers_and_conv1d_that_of_gpt2s_matrices():
    model = build_gpt2()
    assert len(layers_of(model)) == model.config.n_layer and len(linear_layers(model)) == 4 * model.config.n_layer


def test_base_model_tp_plan_has_the_styles_that_are_known():
    plan = transformers.Qwen3Config().base_model_tp_plan
    assert set(plan.values()) == {*sharding.STYLES, sharding.PARTIAL}


@pytest.mark.filterwarnings("error::DeprecationWarning", "error::PendingDeprecationWarning", "error::FutureWarning")
@pytest.mark.parametrize("flags", ["", "--engine plain --use_value_head true", "--lora_rank 4 --gradient_checkpointing"])
def test_a_run_calls_nothing_that_is_deprecated(flags, tmp_path):
    common = "--use_grpo --max_steps 1 --cold_start_steps 1 --eval_limit 2 --batch_size 2 --generation_max_length 8"
    assert (run_folder(tmp_path / "run", *common.split(), *flags.split()) / "final").is_dir()


def test_every_private_name_that_the_program_uses_is_in_a_table_above():
    trees = [ast.parse(path.read_text()) for path in modules_of_the_program()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[:2] != "__"}
    assert used <= {*OPERATORS, *ATTRIBUTES, *DOCUMENTED, *(name.rpartition(".")[2] for name in FUNCTIONS)}
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    assert not [module for module in modules if "._" in module]
    modules -= {"transformers.utils", "peft"}             # documented, as are those of torch
    assert {module for module in modules if module.startswith(("transformers.", "peft"))} <= MODULES


def test_nothing_of_a_library_is_replaced():
    for path in modules_of_the_program():
        for node in ast.walk(ast.parse(path.read_text())):
            for target in getattr(node, "targets", []):
                assert not ast.unparse(target).startswith(("torch.nn", "transformers", "core_model_loading", "peft")), (
                    f"{path.relative_to(ROOT)}:{node.lineno}")
