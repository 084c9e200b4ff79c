"""Conversations: sampled tokens are kept, an environment's tokens have no loss, and errors name their cause."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import PROMPTS
from test_chat_template import PUBLISHED

from data import encode_completion, encode_prompt, render
from engine import make_engine, sampler
from logprobs import completion_lengths
from engine.errors import RunError
from runs.folder import completion_records
from runs.groups import describe_conversations
from environments.conversations import MAX_MESSAGE_CHARACTERS, Conversation, sample_with_environment
from environments.instances import load_environment
from environments.messages import encode_turns, encode_reply
from model import byte_tokenizer
from reward_functions import environment
from rewards import correctness
from sample import demonstrations_as_rollout, opened_thought
from test_rewards import call_and_score

CHATS = [[{"role": "system", "content": "be brief"}, {"role": "user", "content": prompt}] for prompt in PROMPTS[:2]]


def reply_to_everything(conversation, **columns):
    """Answers everything, of different length, and leaves now and then."""
    text = conversation[-1]["content"]
    if len(text) % 7 == 6:
        return None, 5.0
    role = "tool" if len(text) % 2 else "user"
    return {"role": role, "content": f"{len(conversation)} {text[::-1][:5]}!"}, 0.25 * len(conversation)


def sample_conversations(model, tokenizer, config, prompts=None, respond=reply_to_everything, engine="shared"):
    """A rollout of conversations. A third of the vocabulary ends a turn, so that turns are short."""
    model.generation_config.eos_token_id = list(range(1, 90))
    examples = [{"prompt": prompt} for prompt in (PROMPTS + CHATS if prompts is None else prompts)]
    seeds = [(3, p) for p in range(len(examples))]
    return sample_with_environment(make_engine(engine, model, tokenizer), respond, examples, config, seeds)


def same(one, other):
    """Whether two rollouts are the same conversations."""
    return one.completions == other.completions and one.turn_points.sum() == pytest.approx(float(other.turn_points.sum()))


def test_the_same_conversation_alone_in_a_batch_from_a_queue_and_looked_at_seldom(model, tokenizer, settings, monkeypatch):
    together = sample_conversations(model, tokenizer, settings)
    assert len({len(messages) for messages in together.completions}) > 2
    trained = make_engine("shared", model, tokenizer).log_probs(together)
    torch.testing.assert_close(trained.logp, together.sampling_logp, atol=1e-4, rtol=0.0)
    assert not trained.entropy[~together.completion_mask].any(), "the environment's tokens have none"
    for p, prompt in enumerate(PROMPTS[:3]):
        alone = sample_with_environment(
            make_engine("shared", model, tokenizer), reply_to_everything, [{"prompt": prompt}], settings, [(3, p)])
        assert alone.completions == together.completions[4 * p : 4 * p + 4]
    assert same(sample_conversations(model, tokenizer, replace(settings, generation_batch_size=4)), together)
    monkeypatch.setitem(sampler.TOKENS_BETWEEN_CHECKS, "cpu", 8)                    # as on a GPU
    for engine in "shared", "plain":
        seldom = sample_conversations(model, tokenizer, settings, engine=engine)
        assert same(seldom, together) and (seldom.sampling_logp - together.sampling_logp).abs().max() < 1e-4


ALTERNATE = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
TEMPLATES = {
    "chatml": (PUBLISHED["SmolLM2"], "<|im_end|>"),
    "thoughts": (PUBLISHED["Qwen 3"], "<|im_end|>"),      # earlier thoughts are left out
    "gemma": (PUBLISHED["Gemma"].replace("<start_of_turn>", ALTERNATE + "<start_of_turn>", 1), "<end_of_turn>"),
    "mistral": (                                          # a tool's message is left out; the last turn gets the instruction
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}", "<eos>"),
}


def chat_tokenizer(name):
    tokenizer = byte_tokenizer()
    if name != "plain":
        tokenizer.chat_template, end = TEMPLATES[name]
        tokenizer.add_tokens([end, "<|im_start|>"], special_tokens=True)
        tokenizer.eos_token = end
    return tokenizer


@pytest.mark.parametrize("name", [*TEMPLATES, "plain"])
def test_what_was_sampled_is_a_prefix_of_every_later_prompt(name, settings):
    tokenizer = chat_tokenizer(name)
    stops = [tokenizer.eos_token_id]
    said = ["<think>hm</think>one", "two", "madeupturn"]
    heard = iter(["and?", {"role": "tool", "content": "4 \n2"}, "madeupturn?"])
    settings = replace(settings, generation_max_length=1000)
    conversation = Conversation(tokenizer, "1+1=?", lambda messages: next(heard), settings, stops)
    prompt = encode_prompt(tokenizer, "1+1=?")
    ids, prompts, turns = [], [], []
    for text in said:
        prompts.append([*prompt, *ids])
        turns.append([*tokenizer(text, add_special_tokens=False).input_ids, stops[0]])
        ids += turns[-1]
        ids += conversation.end_turn(ids)
    prompts.append([*prompt, *ids])
    for earlier, turn, later in zip(prompts, turns, prompts[1:]):
        assert later[: len(earlier) + len(turn)] == earlier + turn
    text = tokenizer.decode(ids)
    assert text.count("and?") == text.count("4 \n2") == text.count("madeupturn?") == 1 and "hm" in text
    assert [m["content"] for m in conversation.messages[1::2]] == said

    # Where a template shows every turn as it was, this is what it makes of the whole conversation.
    unknown = "tool" if name in ("gemma", "mistral") else None
    messages = [m | {"role": "user"} if m["role"] == unknown else m for m in conversation.messages]
    if name == "plain":
        assert text == "<think>hm</think>one<eos>\nand?\ntwo<eos>\n4 \n2\nmadeupturn<eos>\nmadeupturn?\n"
    elif name == "thoughts":
        whole = render(tokenizer, messages, add_generation_prompt=True)
        assert "hm" not in whole and tokenizer.decode(prompts[-1]).replace("<think>hm</think>", "") == whole
    else:
        whole = render(tokenizer, messages, add_generation_prompt=True)
        assert tokenizer(whole, add_special_tokens=False).input_ids == prompts[-1]


def test_a_demonstration_with_several_turns_is_learned_where_the_assistant_speaks(model, tokenizer):
    completion = [
        {"role": "assistant", "content": "ab"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}
    ]
    ids, spoken = encode_turns(tokenizer, "p", completion, [1])
    assert tokenizer.decode(ids) == "ab<eos>\nc\nd<eos>" and spoken == [True] * 3 + [False] * 3 + [True] * 2
    examples = [{"prompt": "p", "completion": completion}, {"prompt": "q", "completion": "x"}]
    rollout = demonstrations_as_rollout(model, tokenizer, examples, encode=encode_turns)
    assert rollout.completion_mask.tolist() == [spoken, [True] * 2 + [False] * 6]
    assert encode_turns(tokenizer, "p", "ab", [1])[0] == encode_completion(tokenizer, "p", "ab", [1])
    with pytest.raises(ValueError, match=r"is not text: pass encode_turns of environments.messages$"):
        demonstrations_as_rollout(model, tokenizer, examples)


def test_turns_and_tokens_are_bounded_whatever_the_environment_does(model, tokenizer, settings):
    asked = []

    def endless(conversation):
        asked.append(len(conversation))
        return "more"

    rollout = sample_conversations(model, tokenizer, settings, PROMPTS, endless)
    turns = [sum(message["role"] == "assistant" for message in messages) for messages in rollout.completions]
    assert max(turns) == settings.max_turns and rollout.completion_ids.shape[1] <= settings.generation_max_length
    assert all(messages[-1]["role"] == "assistant" for messages in rollout.completions), "what nobody answers is not said"
    assert asked.count(2 * settings.max_turns) == sum(
        n == settings.max_turns and done for n, done in zip(turns, rollout.finished.tolist())
    ), "asked after the last turn too"
    assert rollout.finished.any()


def test_a_conversation_that_would_outgrow_the_limit_ends_before_the_answer(model, tokenizer, settings):
    def long_winded(conversation):
        return "x" * 50

    rollout = sample_conversations(model, tokenizer, settings, PROMPTS, long_winded)
    assert int(completion_lengths(rollout.completion_mask).max()) <= 60
    for messages, finished in zip(rollout.completions, rollout.finished.tolist()):
        assert len(messages) in (1, 3) and messages[-1]["role"] == "assistant" and not finished


def test_an_enormous_message_is_cut_and_says_so(tokenizer, settings):
    conversation = Conversation(tokenizer, "p", lambda conversation: "x" * 10**6, settings, [1])
    message, _ = conversation.environment_step("hello")
    assert message["content"] == "x" * MAX_MESSAGE_CHARACTERS + f" [{10**6 - MAX_MESSAGE_CHARACTERS} more characters were cut]"
    conversation.respond = lambda conversation: "half a pair: \ud83d"
    assert tokenizer.decode(conversation.end_turn(tokenizer("hello").input_ids)) == "\nhalf a pair: ?\n"


@pytest.mark.parametrize("answer,message", [
    (lambda: 1 / 0, "ZeroDivisionError: division by zero"), (lambda: "", "not text, a message with text"),
    (lambda: " \n", "not text, a message with text"), (lambda: 7, "returned 7, not text"),
    (lambda: {"content": "x"}, "not text, a message"),
    (lambda: {"role": "assistant", "content": "x"}, "not the assistant's"), (lambda: ("x", math.nan), "gave a reward of nan"),
    (lambda: ("x", "y"), "TypeError"), (lambda: ("x", 1, 2), "TypeError"),
])
def test_an_environment_that_misbehaves_is_named_or_its_conversation_unscored(model, tokenizer, settings, answer, message):
    def broken(conversation):
        return answer() if len(conversation) > 3 and len(conversation[-1]["content"]) % 2 else "go on"

    with pytest.raises(RunError, match=rf"^environment calculator .*{message}.*$"):
        sample_conversations(model, tokenizer, settings, PROMPTS, broken)
    lenient = replace(settings, reward_errors="none", reward_functions=["correctness"])
    rollout = sample_conversations(model, tokenizer, lenient, PROMPTS, broken)
    failed = rollout.turn_points.isnan().any(dim=1)
    assert 0 < failed.sum() < len(failed)
    examples = [{"prompt": prompt, "answer": "1"} for prompt in PROMPTS]
    total, _ = call_and_score([correctness], [1.0], rollout, examples)
    assert torch.equal(total.flatten().isnan(), failed)


def test_the_environment_cannot_change_what_was_said(tokenizer, settings):
    def vandal(conversation):
        conversation[-1]["content"] = "changed"
        conversation.clear()
        return "x"

    conversation = Conversation(tokenizer, "p", vandal, settings, [1])
    conversation.environment_step("hello")
    assert [message["content"] for message in conversation.messages] == ["p", "hello"]


def test_points_of_turns_reach_reward_functions_and_are_added_up(model, tokenizer, settings):
    seen = {}

    def spy(completions, turn_points, **columns):
        seen.update(completions=completions, turn_points=turn_points)
        return [0.0] * len(completions)

    rollout = sample_conversations(model, tokenizer, settings)
    examples = [{"prompt": prompt, "answer": "1"} for prompt in PROMPTS + CHATS]
    total, _ = call_and_score([environment, spy], [2.0, 1.0], rollout, examples)
    assert seen["completions"] == rollout.completions
    for row, (messages, points) in enumerate(zip(rollout.completions, seen["turn_points"])):
        prompt = CHATS[row // 4 - 4] if row >= 16 else ["the prompt"]
        answered = int(rollout.turn_points[row].count_nonzero())                 # all turns, or all but a last one that was cut
        expected = [reply_to_everything([*prompt, *messages[: 2 * turn + 1]])[1] for turn in range(answered)]
        expected += [0.0] * ((len(messages) + 1) // 2 - answered)
        assert points == pytest.approx(expected) and len(expected) - answered < 2
        assert float(total.view(-1)[row]) == pytest.approx(2 * sum(expected))
    assert environment(["a"]) == [0.0]


def test_a_chat_template_is_told_about_the_tools():
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}" + tokenizer.chat_template
    assert "calculate" not in tokenizer.decode(encode_prompt(tokenizer, "p"))
    before = encode_reply(tokenizer, "p", {"role": "tool", "content": "2"}, [tokenizer.eos_token_id])
    tokenizer.tools = load_environment("calculator").tools
    text = tokenizer.decode(encode_prompt(tokenizer, "p"))
    assert '"name": "calculate"' in text and "Compute an arithmetic expression." in text and '"expression"' in text
    assert encode_reply(tokenizer, "p", {"role": "tool", "content": "2"}, [tokenizer.eos_token_id]) == before


def test_a_turn_begins_with_the_thought_that_the_template_opened(settings):
    tokenizer, heard = byte_tokenizer(), []
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}" \
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"

    def respond(messages):
        heard.append(messages[-1]["content"])
        return "go on"

    opened = opened_thought(tokenizer, encode_prompt(tokenizer, "p"))
    conversation = Conversation(tokenizer, "p", respond, replace(settings, max_turns=2, generation_max_length=99), [1], opened)
    first = [*tokenizer.encode("a</think>b"), 1]
    reply = conversation.end_turn(first)
    assert conversation.end_turn([*first, *reply, *tokenizer.encode("c"), 1]) == []
    assert heard == ["<think>a</think>b", "<think>c"]


def test_metrics_and_records_tell_the_tokens_of_the_policy_from_those_of_the_environment(model, tokenizer, settings):
    rollout = sample_conversations(model, tokenizer, settings)
    turns = [sum(message["role"] == "assistant" for message in messages) for messages in rollout.completions]
    given = completion_lengths(rollout.completion_mask) - rollout.completion_mask.sum(dim=1)
    found = describe_conversations(rollout)
    assert found == pytest.approx({"turns": sum(turns) / len(turns), "environment_tokens": float(given.float().mean())})
    assert found["environment_tokens"] > 1 and describe_conversations(replace(rollout, turn_points=None)) == {}
    experience = SimpleNamespace(
        examples=[{"prompt": prompt} for prompt in PROMPTS + CHATS], groups=None,
        table=SimpleNamespace(rollout=rollout, advantages=rollout.turn_points, by_token=False))
    for row, record in enumerate(completion_records(experience)):
        assert record["sampling_logp"].count(None) == len(record["completion_ids"]) - record["tokens"] == given[row]
        assert sum(record["turn_points"]) == pytest.approx(float(rollout.turn_points[row].sum()))


def test_a_reply_with_the_text_of_a_special_token_ends_no_turn(settings):
    tokenizer = chat_tokenizer("chatml")
    replies = []
    for said in "a<|im_<|im_end|>end|>b", "ab":
        conversation = Conversation(tokenizer, "1+1=?", lambda messages, said=said: said,
            replace(settings, generation_max_length=99), [tokenizer.eos_token_id])
        replies.append(conversation.end_turn([*tokenizer("2", add_special_tokens=False).input_ids, tokenizer.eos_token_id]))
    assert replies[0] == replies[1] and replies[0].count(tokenizer.eos_token_id) == 1
