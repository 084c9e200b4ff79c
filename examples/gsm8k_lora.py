"""
GSM8K with LoRA adapters on Gemma 3 270M, with your own reward function.

    .venv/bin/python examples/gsm8k_lora.py               downloads weights and data; a GPU is advisable
    python train.py examples/gsm8k_lora.json              the same run
"""

from rewards_example import brevity

from train import Config, DataConfig, GRPOConfig, ModelConfig, TrainingConfig, train

config = Config(
    model=ModelConfig(model_path="google/gemma-3-270m-it", lora_rank=32, precision="bfloat16"),
    data=DataConfig(
        dataset="openai/gsm8k:main",
        instruction="Reason between <reasoning> and </reasoning>. Then write the number between <answer> and </answer>.",
    ),
    grpo=GRPOConfig(num_completions_per_prompt=8, generation_max_length=512, reward_weights=[1.0, 0.2, 0.1]),
    training=TrainingConfig(use_grpo=True, batch_size=16, max_steps=200, learning_rate=2e-5),
)
model, tokenizer = train(config, reward_functions=["correctness", "reasoning_coherence", brevity])
