"""
Reward functions with the signatures and the habits of published ones, with bodies of our own. The data has the columns
prompt (chat messages), question, solution, answer, task, verification_info, data_source and extra_info.
"""

import asyncio
import re
import signal
import threading


# TRL's documentation: of token ids, without completions.
def reward_of_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


# TRL's documentation: a column of the data under its own name, and chat messages.
def reward_of_column(prompts, completions, solution, **kwargs):
    return [1.0 if truth in completion[0]["content"] else 0.0 for completion, truth in zip(completions, solution, strict=True)]


# TRL's documentation, "Multi-task reward functions": None for the other task.
def reward_of_sums(prompts, completions, task, **kwargs):
    return [float("7" in c[0]["content"]) if kind == "sum" else None for c, kind in zip(completions, task, strict=True)]


# TRL's documentation: asynchronous, such as a request for each completion.
async def reward_by_request(prompts, completions, **kwargs):
    async def request(prompt, completion):
        await asyncio.sleep(0.01)
        return len(prompt[-1]["content"]) + len(completion[0]["content"])

    return await asyncio.gather(*map(request, prompts, completions))


# TRL's documentation: trainer_state, log_extra and log_metric.
def reward_with_schedule(completions, solution, trainer_state=None, log_extra=None, log_metric=None, **kwargs):
    log_extra("gold", solution)
    log_metric("rest", 1 - trainer_state.global_step / trainer_state.max_steps)
    return [1 - trainer_state.global_step / trainer_state.max_steps for _ in completions]


# open-r1, accuracy_reward: None where the gold cannot be parsed, and a time limit by signal.alarm around the comparison,
# as math-verify's verify has by default.
def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs) -> list[float | None]:
    def expire(number, frame):
        raise TimeoutError

    points = []
    for content, truth in zip([completion[0]["content"] for completion in completions], solution, strict=True):
        before = signal.signal(signal.SIGALRM, expire)
        signal.alarm(5)
        try:
            points.append(float(float(truth) == float(re.findall(r"\d+", content + " 0")[0])))
        except (TimeoutError, ValueError):
            points.append(None)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    return points


# open-r1, code_reward: options with defaults, its column in kwargs alone, and an event loop of its own.
def code_reward(completions, num_parallel: int = 2, provider_type: str = "local", enforce_same_language=False, **kwargs):
    async def run(completion, info):
        await asyncio.sleep(0)
        return float(len(info["inputs"]) == num_parallel) + (info["language"] in completion[0]["content"])

    async def run_all():
        return list(await asyncio.gather(*map(run, completions, kwargs["verification_info"])))

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(run_all())
    finally:
        loop.close()


# verl, custom_reward_function and verl/utils/reward_score: called for each response, with a dict of a score and more.
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    return {"score": float(found[-1:] == [ground_truth]), "index": extra_info["index"]}


# ms-swift's ORM: a class with __call__.
class BrevityORM:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, completions, solution, question, **kwargs) -> list[float]:
        with self.lock:
            assert solution[0] == "7" and question[0] == "6+1=?"
        return [-len(c[0]["content"] if isinstance(c, list) else c) for c in completions]
