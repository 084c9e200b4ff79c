"""
The demonstration from Python: the built-in Gemma learns to add. `python train.py examples/demo.json` is the same run.

    .venv/bin/python examples/demo.py                     three to six minutes on two CPU cores, no downloads
"""

from train import Config, train

model, tokenizer = train(Config.from_profile("demo", use_grpo=True))

prompt = tokenizer("47+85=?", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]))
