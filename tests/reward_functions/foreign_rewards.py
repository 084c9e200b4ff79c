"""
Reward functions with signatures and habits of published ones that test_calling.py does not have, with bodies
of our own. Columns: prompt (chat messages), solution, answer, verification_info, data_source and extra_info.
"""

import asyncio
import re
import signal


# open-r1, accuracy_reward and code_reward: None where the gold cannot be parsed, and a time limit by signal.alarm around the
# comparison, as math-verify's verify has by default; options with defaults, a column in kwargs alone, an event loop of its own.
def accuracy_reward(
    completions: list[list[dict[str, str]]], solution: list[str], num_parallel: int = 2, **kwargs) -> list[float | None]:
    async def compare(content, truth, info):
        await asyncio.sleep(0)
        try:
            return float(float(truth) == float(re.findall(r"\d+", content + " 0")[0]) and len(info["inputs"]) == num_parallel)
        except ValueError:
            return None

    async def compare_all():
        contents = [completion[0]["content"] for completion in completions]
        return await asyncio.gather(*map(compare, contents, solution, kwargs["verification_info"]))

    def expire(number, frame):
        raise TimeoutError

    before, loop = signal.signal(signal.SIGALRM, expire), asyncio.new_event_loop()
    signal.alarm(5)
    try:
        return loop.run_until_complete(compare_all())
    finally:
        loop.close()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# verl, custom_reward_function and verl/utils/reward_score: called for each response, with a dict of a score and more.
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    return {"score": float(found[-1:] == [ground_truth]), "index": extra_info["index"]}
