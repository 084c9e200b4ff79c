"""What the program uses of torch and transformers that could change without an error, and what they have deprecated."""

import inspect

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, run_folder
from transformers import core_model_loading


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


@pytest.mark.filterwarnings("error::DeprecationWarning", "error::PendingDeprecationWarning", "error::FutureWarning")
@pytest.mark.parametrize("flags", ["", "--engine plain --use_value_head true", "--lora_rank 4 --gradient_checkpointing"])
def test_a_run_calls_nothing_that_is_deprecated(flags, tmp_path):
    common = "--use_grpo --max_steps 1 --cold_start_steps 1 --eval_limit 2 --batch_size 2 --generation_max_length 8"
    assert (run_folder(tmp_path / "run", *common.split(), *flags.split()) / "final").is_dir()
