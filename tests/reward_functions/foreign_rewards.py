"""
Reward functions with signatures and habits of published ones that test_calling.py does not have, with bodies
of our own. Columns: prompt (chat messages), solution, answer, verification_info, data_source and extra_info.
"""

import asyncio
import re
import signal


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
