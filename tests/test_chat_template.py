"""--chat_template and --chat_template_kwargs, with a template that thinks as Qwen 3's does."""

import json
import shutil

import pytest
import torch
from conftest import ARCHITECTURES, quick_config

from config import GRPOConfig, ModelConfig
from data import encode_demonstration, encode_prompt
from environments.conversations import Conversation
from environments.messages import encode_reply, encode_turns
from engine.models import load_any_policy, load_any_tokenizer, save_any_policy
from model import byte_tokenizer
from policy import Policy
from runs.groups import Scoring, sampler_of
from runs.setup import set_up
from sample import demonstrations_as_rollout, stop_token_ids
from sources import load_examples
from sources.token_check import encode_prompts

# As Qwen 3's: thoughts of turns before the last question are left out, a turn without thoughts gets empty ones, and
# enable_thinking=false begins the answer with empty ones.
TEMPLATE = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor -%}
{%- for m in messages -%}
{%- set content = m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif -%}
{{ content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif -%}
{%- endif -%}"""
OFF = '{"enable_thinking": false}'
EMPTY = "<think>\n\n</think>\n\n"
OPEN = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a small model with the template and with EOS at the end of a turn."""
    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("qwen") / "base", byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", TEMPLATE
    model = ARCHITECTURES["qwen3"]().eval()
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_any_policy(model, tokenizer, folder)
    return folder


def load(folder, **flags):
    return load_any_tokenizer(ModelConfig(str(folder), **flags))


def test_variables_reach_the_template_and_are_saved_with_the_tokenizer(base, tmp_path):
    for variables, expected in [("", OPEN), ("{}", OPEN), ('{"enable_thinking": true}', OPEN), (OFF, OPEN + EMPTY)]:
        tokenizer = load(base, chat_template_kwargs=variables)
        assert tokenizer.decode(encode_prompt(tokenizer, "1+1=?")) == expected
        reply = encode_reply(tokenizer, "1+1=?", {"role": "user", "content": "no"}, [tokenizer.eos_token_id])
        opened = expected.removeprefix(OPEN)
        assert tokenizer.decode(reply) == f"\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n{opened}", "the next turn"
    again = shutil.copytree(base, tmp_path / "again")
    tokenizer.save_pretrained(again)
    for variables, expected in [("", OPEN + EMPTY), ("{}", OPEN), (OFF, OPEN + EMPTY)]:
        tokenizer = load(again, chat_template_kwargs=variables)
        assert tokenizer.decode(encode_prompt(tokenizer, "1+1=?")) == expected


@pytest.mark.parametrize("variables,demonstration,sampled", [
    (OFF, "2", "2<|im_end|>"), ("", "<think>\nhm\n</think>\n\n2", "<think>\nhm\n</think>\n\n2<|im_end|>"),
])
def test_prompt_and_demonstration_are_what_the_template_makes_of_both(base, variables, demonstration, sampled):
    tokenizer = load(base, chat_template_kwargs=variables)
    ids, own = encode_demonstration(tokenizer, "1+1=?", demonstration, [tokenizer.eos_token_id])
    assert tokenizer.decode(ids) == sampled and all(own)
    messages = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": demonstration}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(encode_prompt(tokenizer, "1+1=?") + ids) + "\n" == whole


def test_none_leaves_text_as_it_is(base):
    tokenizer = load(base, chat_template="none")
    ready = OPEN + EMPTY
    assert tokenizer.decode(encode_prompt(tokenizer, ready)) == f"<bos>{ready}"    # this tokenizer puts a BOS before every text
    assert encode_prompt(tokenizer, "1+1=?") == encode_prompt(byte_tokenizer(), "1+1=?")
    ids, _ = encode_demonstration(tokenizer, "1+1=?", "2", [tokenizer.eos_token_id])
    assert tokenizer.decode(ids) == "2<|im_end|>"


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
ASKED = {"role": "user", "content": "1+1=?"}
CALL = {"type": "function", "id": None, "function": {"name": "add", "arguments": {"a": 1, "message": None}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": None, "b": {"c": None}}}}
CLEAN = '[{"type": "function", "function": {"name": "add", "parameters": {"b": {}}}}]'


def said(*calls, content="", **more):
    return {"role": "assistant", "content": content, "tool_calls": list(calls) or None} | more


@pytest.mark.parametrize("completion,expected", [
    ([said(CALL, content="I look.")], 'I look.<call>add {"a": 1}<|im_end|>'),
    ([said(CALL, content=None)], '<call>add {"a": 1}<|im_end|>'),
    ([said({"function": {"name": "add", "arguments": '{"a": 1}'}}, CALL)], '<call>add {"a": 1}<call>add {"a": 1}<|im_end|>'),
    ([said(content=" 2\n", id=None)], " 2\n<|im_end|>"), ([said(content="2", id="x")], "does not write all of .*'id': 'x'"),
    ([said(CALL, content="I look."), {"role": "tool", "content": "2"}, said(content="2!")],
     'I look.<call>add {"a": 1}<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n2!<|im_end|>'),
    ([said({"function": {"name": "now", "arguments": None}})], "<call>now {}<|im_end|>"),
    ([said(content="2", function_call={"name": "add"})], "does not write all of .*'function_call'"),
    ([said(content="2", reasoning_content="hm")], "does not write all of .*'reasoning_content'"),
])
def test_a_demonstration_with_calls_is_written_by_the_template_or_refused(base, completion, expected):
    tokenizer = load(base)
    tokenizer.chat_template = CALLS
    stops = [tokenizer.eos_token_id]
    for row in {"prompt": [ASKED], "completion": completion}, {"messages": [ASKED, *completion]}:
        (example,) = load_examples([row])
        if len(completion) > 1 and "messages" in row:
            text = tokenizer.decode(encode_prompt(tokenizer, example["prompt"]))
            assert example["completion"] == "2!" and '<call>add {"a": 1}<|im_end|>' in text
        elif expected.startswith("does"):
            with pytest.raises(ValueError, match=f"^the chat template {expected}.*; make it content$"):
                encode_turns(tokenizer, example["prompt"], example["completion"], stops)
        else:
            assert tokenizer.decode(encode_turns(tokenizer, example["prompt"], example["completion"], stops)[0]) == expected
    tokenizer.chat_template = CALLS.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
    with pytest.raises(ValueError, match="the prompt lacks the user's message"):
        encode_turns(tokenizer, [ASKED], [said(CALL, content="I look.")], stops)


@pytest.mark.parametrize("tools,written", [
    ([ADD], CLEAN), (json.dumps([ADD]), CLEAN), ([ADD["function"]], CLEAN), (json.dumps([ADD["function"]]), CLEAN),
    (None, ""), ([], ""),
])
def test_the_tools_of_a_row_are_written_by_the_template(base, tools, written):
    model, tokenizer = load_any_policy(ModelConfig(str(base)))
    tokenizer.chat_template = CALLS
    example = load_examples([{"prompt": [ASKED], "completion": "2", "tools": tools}])[0]
    expected = f"{written}{OPEN}"
    assert tokenizer.decode(encode_prompt(tokenizer, example)) == expected
    settings = GRPOConfig(generation_max_length=2, num_completions_per_prompt=2)
    policy = Policy(model, tokenizer)
    for environment in None, lambda messages: None:
        sample = sampler_of(policy, Scoring([], [], environment))
        assert tokenizer.decode(sample([example], settings, [(0, 0)]).prompt_ids[0]) == expected
    assert tokenizer.decode(demonstrations_as_rollout(model, tokenizer, [example]).prompt_ids[0]) == expected
    tokenizer.tools = [{"function": "of the environment"}]
    assert ("of the environment" in tokenizer.decode(encode_prompt(tokenizer, example))) == (not written)


GLM = "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" \
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def test_a_turn_that_ends_with_the_next_role_ends_once():
    tokenizer = published("Phi")
    tokenizer.chat_template, user = GLM, tokenizer.convert_tokens_to_ids("<|user|>")
    stops, reply = [tokenizer.eos_token_id, user], {"role": "user", "content": "b"}
    for ended_by, expected in (user, "\nb<|assistant|>\n"), (tokenizer.eos_token_id, "<|user|>\nb<|assistant|>\n"):
        assert tokenizer.decode(encode_reply(tokenizer, "a", reply, stops, ended_by)) == expected
    conversation = Conversation(tokenizer, "a", lambda messages: "b", GRPOConfig(generation_max_length=99, max_turns=2), stops)
    assert tokenizer.decode(conversation.end_turn([*tokenizer("x", add_special_tokens=False).input_ids,
        user])) == "\nb<|assistant|>\n"
    ids, own = encode_turns(tokenizer, "a", [said(content="x"), reply, said(content="y")], stops)
    assert tokenizer.decode(ids) == "x<eos><|user|>\nb<|assistant|>\ny<eos>" and own[:3] == [True, True, False]


@pytest.mark.parametrize("template,stop", [
    ("ChatML", "<|im_end|>"), ("Llama 3", "<|eot_id|>"), ("Gemma", "<end_of_turn>"), ("Phi", "<|end|>"), (GLM, None),
    (None, None),
    ("{% for m in messages %}{{ m.content }}\n<|im_end|>{% endfor %}", "<|im_end|>"), ("{{ raise_exception('no') }}", None),
    ("{% for m in messages %}{{ m.content }} end{% endfor %}", None),
])
def test_the_token_with_which_the_template_ends_a_turn_stops_completions(template, stop):
    tokenizer, model = published("ChatML"), ARCHITECTURES["qwen3"]()
    tokenizer.chat_template, model.generation_config.eos_token_id = PUBLISHED.get(template, template), None
    expected = {tokenizer.eos_token_id, *([tokenizer.convert_tokens_to_ids(stop)] if stop else [])}
    assert set(stop_token_ids(model, tokenizer)) == expected


@pytest.mark.parametrize("known", [True, False])
def test_the_role_of_a_tool_does_not_depend_on_what_it_says(known):
    tokenizer = byte_tokenizer()
    content = "{{ m.content | tojson }}" if known else "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]" + content + "{% endfor %}"
    for said in 'error: no tool "x"', "two\nlines", "<eos>", "madeupturn":
        reply = tokenizer.decode(encode_reply(tokenizer, "1+1=?", {"role": "tool", "content": said}, [1]))
        assert reply.startswith("[tool]" if known else "[user]") or reply.startswith('"[tool]'), reply


def test_a_template_that_writes_the_date_writes_the_same_on_every_day(base, tmp_path, capsys):
    folder = shutil.copytree(base, tmp_path / "dated")
    clock = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
    (folder / "chat_template.jinja").write_text(clock + TEMPLATE)
    for variables, day in ("", "26 Jul 2024"), ('{"date_string": "1 May 2025"}', "1 May 2025"):
        tokenizer = load(folder, chat_template_kwargs=variables)
        assert tokenizer.decode(encode_prompt(tokenizer, "1+1=?")) == day + OPEN
    set_up(quick_config(tmp_path / "run", model_path=str(folder), max_steps=1, eval_limit=0, generation_max_length=2))
    assert "  note   the chat template writes the date; in all prompts it is 26 Jul 2024\n" in capsys.readouterr().out


def test_variables_need_a_template_that_has_them(base, tokenizer, tmp_path):
    save_any_policy(ARCHITECTURES["qwen3"](), tokenizer, tmp_path)
    for folder, template, kwargs, said in (tmp_path, "auto", OFF, "does not exist"), (base, "none", OFF, "does not exist"), (
            base, "auto", '{"enable_thinkng": false}', "has no variable enable_thinkng"):
        with pytest.raises(ValueError, match=rf"^--chat_template_kwargs=\{{.*: the chat template {said}$"):
            load(folder, chat_template=template, chat_template_kwargs=kwargs)


# The chat templates of model families, shortened; each begins, ends and trims as the published one does.
PUBLISHED = {
    "SmolLM2": "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are helpful<|im_end|>\n"
               "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
               "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "ChatML": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "Llama 3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
               "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "Gemma": "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
             "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "Qwen 3": TEMPLATE,
    "Phi": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
           "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
}
TURN_TOKENS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
               "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]


def published(family, bos="<bos>"):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(TURN_TOKENS, special_tokens=True)
    tokenizer.chat_template, tokenizer.bos_token = PUBLISHED[family], bos
    return tokenizer


@pytest.mark.parametrize("family, bos", [*((family, "<bos>") for family in PUBLISHED), ("ChatML", "<|im_start|>")])
def test_prompts_of_published_templates_are_those_of_transformers_and_pass_the_check(family, bos):
    tokenizer = published(family, bos)
    system = [{"role": "system", "content": "Be short."}, {"role": "user", "content": " 1+1=? \n"}]
    longer = [*system, {"role": "assistant", "content": "2"}, {"role": "user", "content": "and 2+2?"}]
    prompts = [system[1:], system, longer]
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    for prompt, own in zip(prompts, ids, strict=True):
        assert own == tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    assert encode_prompts([{"prompt": prompt} for prompt in prompts], tokenizer, "") == ids


@pytest.mark.parametrize("demonstration", [" \n18", "so:\n\n18\n\n"])
@pytest.mark.parametrize("family", PUBLISHED)
def test_a_demonstration_ends_with_the_token_that_the_template_writes(family, demonstration):
    tokenizer = published(family)
    end = {"Llama 3": "<|eot_id|>", "Gemma": "<end_of_turn>", "Phi": "<|end|>"}.get(family, "<|im_end|>")
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end)]
    for prompt in "1+1=?", [{"role": "system", "content": "madeupturn"}, {"role": "user", "content": "1+1=?"}]:
        ids, own = encode_demonstration(tokenizer, prompt, demonstration, stops)
        assert tokenizer.decode(ids) == demonstration + end and all(own)
