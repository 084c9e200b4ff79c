"""Columns and formats of data, tokens of prompts and demonstrations, and the order of examples."""

import json
import random
import signal
import statistics
from collections import Counter
from pathlib import Path

import pytest
from conftest import comparable, run_folder, start_run, weights_of

import train
from data import encode_completion, encode_prompt, load_examples, with_instruction
from sources.batches import PromptMemory, ShuffledBatches, prompt_key
from runs.run import Run
from runs.command_line import parse_config
from runs.records import read_jsonl
from runs.setup import load_data

GSM8K = Path(__file__).parents[1] / "../shared/data/gsm8k"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_other_column_names_and_whole_conversations(tmp_path):
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "q", "solution": 5, "response": "r"}) + "\n")
    assert load_examples(str(path)) == [{"prompt": "q", "answer": "5", "completion": "r"}]
    path.write_text(json.dumps({"messages": chat}) + "\n")
    assert load_examples(str(path)) == [{"prompt": chat[:1], "completion": "4"}]
    path.write_text(json.dumps({"prompt": chat[:1], "completion": chat[1:], "answer": "2020-01-01"}) + "\n")
    assert load_examples(str(path)) == [{"prompt": chat[:1], "completion": "4", "answer": "2020-01-01"}]


def test_columns_can_be_named(tmp_path):
    row = {"frage": "q", "prompt": "not this", "solution": "because", "gold": 7}
    path = write_lines(tmp_path / "data.jsonl", [row])
    named = load_examples(path, columns={"prompt": "frage", "answer": "gold", "completion": "solution"})
    assert named == [{"prompt": "q", "answer": "7", "completion": "because"}]
    demonstrated = load_examples(path, columns={"prompt": "frage", "answer": "", "completion": "solution"})
    assert demonstrated == [{"prompt": "q", "completion": "because", "gold": 7}], "not the answer, which it would be otherwise"
    assert load_examples(path, columns={"answer": "gold"}) == [{"frage": "q", "prompt": "not this", "solution": "because",
                                                                "answer": "7"}]
    both = load_examples(path, columns={"prompt": "frage", "answer": "solution", "completion": "solution"})
    assert both == [{"prompt": "q", "answer": "because", "completion": "because", "gold": 7}]
    train_set, _ = data_of("--dataset", path, "--eval_limit", "0", "--prompt_column", "frage", "--answer_column", "gold")
    assert [e["prompt"] for e in train_set] == ["q"]


@pytest.mark.parametrize("name", ["prompt", "answer", "completion"])
def test_a_column_that_is_not_there_lists_those_that_are(tmp_path, name):
    path = write_lines(tmp_path / "data.jsonl", [{"prompt": "a", "answer": "1"}])
    with pytest.raises(ValueError, match=rf"--{name}_column=gold: .*data.jsonl: example 1 has columns prompt, answer$"):
        load_examples(path, columns={name: "gold"})


@pytest.mark.parametrize("answer,number,demonstration", [
    ("2+2=<<2+2=4>>4, 4+1=<<4+1=5>>5\n####  5 ", "5", "<reasoning>2+2=4, 4+1=5</reasoning><answer>5</answer>"),
    ("a #### b\n#### 1,234,000", "1234000", "<reasoning>a #### b</reasoning><answer>1234000</answer>"),
])
def test_an_answer_in_gsm8ks_form_is_taken_apart(tmp_path, answer, number, demonstration):
    rows = [{"question": "q", "answer": answer}, {"question": "q", "answer": answer, "completion": "mine"}]
    examples = load_examples(write_lines(tmp_path / "data.jsonl", rows))
    assert examples[0] == {"prompt": "q", "answer": number, "completion": demonstration}
    assert examples[1] == {"prompt": "q", "answer": number, "completion": "mine"}


def test_a_column_without_a_value_is_as_good_as_not_there(tmp_path):
    rows = [{"prompt": None, "question": "q", "answer": None, "target": 3}, {"prompt": "p", "answer": None}]
    examples = load_examples(write_lines(tmp_path / "data.jsonl", rows))
    assert examples == [{"prompt": "q", "answer": "3"}, {"prompt": "p", "answer": None}]


def data_of(*flags):
    return load_data(parse_config([*flags]))


def test_prompts_that_say_the_same_have_one_key_and_others_have_not():
    same = ["What is  2+2?", "what is\n2+2? ", [{"role": "user", "content": "What is 2+2?"}]]
    assert len({prompt_key(prompt) for prompt in same}) == 1
    others = ["What is 2+3?", [{"role": "system", "content": "What is 2+2?"}], [5, 6], [5, 7],
              [{"role": "user", "content": "What is"}, {"role": "user", "content": "2+2?"}]]
    assert len({prompt_key(prompt) for prompt in [same[0], *others]}) == 6


USER, ASSISTANT = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "<answer>2</answer>"}
SYSTEM = {"role": "system", "content": "Add."}
FORMATS = {                     # row, and the example that it is
    "prompt only": ({"prompt": "1+1=?"}, {"prompt": "1+1=?"}),
    "prompt and other columns": (
        {"prompt": "1+1=?", "level": 3, "rejected": "3"}, {"prompt": "1+1=?", "level": 3, "rejected": "3"}),
    "prompt and completion": (
        {"prompt": "1+1=?", "completion": "2"}, {"prompt": "1+1=?", "completion": "2"}),
    "conversational prompt": ({"prompt": [SYSTEM, USER]}, {"prompt": [SYSTEM, USER]}),
    "conversational prompt and completion": (
        {"prompt": [USER], "completion": [ASSISTANT]}, {"prompt": [USER], "completion": ASSISTANT["content"]}),
    "messages": ({"messages": [SYSTEM, USER, ASSISTANT]}, {"prompt": [SYSTEM, USER], "completion": ASSISTANT["content"]}),
    "messages of several turns": (
        {"messages": [USER, ASSISTANT, USER, ASSISTANT]},
        {"prompt": [USER, ASSISTANT, USER], "completion": ASSISTANT["content"]}),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_trls_formats_are_read(name, suffix, tmp_path):
    import datasets

    row, example = FORMATS[name]
    table, path = datasets.Dataset.from_list([row | {"solution": "2"}] * 3), tmp_path / f"data.{suffix}"
    (table.to_json if suffix == "jsonl" else table.to_parquet)(path)
    assert load_examples(str(path)) == [example | {"answer": "2"}] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt and completion", "conversational prompt", "messages"])
def test_trls_formats_and_reward_functions_run_unchanged(name, tmp_path):
    row, example = FORMATS[name]
    path = write_lines(tmp_path / "data.jsonl", [row | {"solution": str(i)} for i in range(8)])
    chat = isinstance(example["prompt"], list)
    (tmp_path / "trl.py").write_text(
        "def points(prompts, completions, completion_ids, answer, **kwargs):\n"
        f"    texts = [c[0]['content'] if {chat} else c for c in completions]\n"
        f"    assert all(p == {example['prompt']!r} for p in prompts) and len(answer) == len(texts)\n"
        "    return [float(len(ids) % 5 + len(text) % 3) for ids, text in zip(completion_ids, texts)]\n"
    )
    cold = "1" if "completion" in example else "0"
    folder = run_folder(
        tmp_path / "run", "--use_grpo", "--dataset", path, "--eval_limit", "0", "--cold_start_steps", cold, "--max_steps", "1",
        "--reward_functions", f"{tmp_path}/trl.py:points",
    )
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [m["phase"] for m in lines] == ["cold_start"] * int(cold) + ["grpo"] and lines[-1]["grad_norm"] > 0


@pytest.fixture
def chat_tokenizer():
    from model import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(["<end>"])
    return tokenizer


def test_bos_comes_once_with_and_without_a_chat_template(tokenizer, chat_tokenizer):
    plain = encode_prompt(tokenizer, "1+1=?")
    assert plain.count(2) == 1 and tokenizer.decode(plain[1:]) == "1+1=?"
    chat = encode_prompt(chat_tokenizer, "1+1=?")
    assert chat.count(2) == 1 and chat_tokenizer.decode(chat[1:]) == "<user>1+1=?<end>\n<assistant>"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert chat_tokenizer.decode(encode_prompt(chat_tokenizer, messages)[1:]) == "<system>s<end>\n<user>u<end>\n<assistant>"
    assert tokenizer.decode(encode_prompt(tokenizer, messages)[1:]) == "system: s\nuser: u\nassistant: "
    assert encode_prompt(tokenizer, [5, 6, 7]) == [5, 6, 7]


def test_a_demonstration_ends_with_one_stop_token(tokenizer, chat_tokenizer):
    assert encode_completion(tokenizer, "p", "ab", [1]) == [*tokenizer("ab", add_special_tokens=False).input_ids, 1]
    end = chat_tokenizer.convert_tokens_to_ids("<end>")
    expected = [*chat_tokenizer("ab", add_special_tokens=False).input_ids, end]
    assert encode_completion(chat_tokenizer, [5, 6, 7], "ab", [1, end]) == expected, "a truncated prompt"
    assert encode_completion(chat_tokenizer, "p", "ab", [1, end]) == expected, "the template's own end of turn"


def test_the_byte_tokenizer_writes_and_reads_any_text(tokenizer):
    for text in "47+85=?", "<reasoning>é 漢字 \n\t</reasoning><answer>🙂</answer>", " leading", "a  b":
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer("<answer>é</answer>", add_special_tokens=False).input_ids) == 4


def test_a_template_that_refuses_a_prompt_says_so_in_one_line(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"refuses the prompt.*System role not supported"):
        encode_prompt(chat_tokenizer, [{"role": "system", "content": "s"}])


def test_an_instruction_goes_before_the_prompt_or_into_the_first_message():
    assert with_instruction({"prompt": "q"}, "do it") == {"prompt": "do it\nq"}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    changed = with_instruction({"prompt": chat}, "do it")["prompt"]
    assert changed[0]["content"] == "do it\nq" and changed[1:] == chat[1:] and chat[0]["content"] == "q"


def test_every_epoch_hands_out_each_example_once_in_a_new_order():
    batches = ShuffledBatches(list(range(10)), batch_size=4, seed=0)
    stream = [example for _ in range(10) for example in next(batches)]
    epochs = [stream[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_position_is_the_whole_state():
    examples = list(range(7))
    first = ShuffledBatches(examples, batch_size=3, seed=5)
    for _ in range(4):
        next(first)
    second = ShuffledBatches(examples, batch_size=3, seed=5)
    second.position = first.position
    assert [next(first) for _ in range(5)] == [next(second) for _ in range(5)]


def test_without_a_memory_the_order_depends_on_seed_and_position_alone():
    def as_it_always_was(seed):
        for epoch in range(3):
            order = list(range(7))
            random.Random(f"{seed} {epoch}").shuffle(order)
            yield from order

    for seed in 0, 1, 12:
        batches = ShuffledBatches(list(range(7)), batch_size=3, seed=seed)
        assert [e for _ in range(7) for e in next(batches)] == list(as_it_always_was(seed))
        assert batches.position == 21 and batches.take(0) == []


def examples_of(*prompts):
    return [{"prompt": prompt} for prompt in prompts]


def test_a_memory_of_nothing_leaves_the_order_as_it_is():
    examples = examples_of(*map(str, range(10)))
    plain, preferring = (ShuffledBatches(examples, 4, 0, memory) for memory in (None, PromptMemory()))
    assert [next(plain) for _ in range(10)] == [next(preferring) for _ in range(10)]
    preferring.memory.record(["3"], [[0.7, 0.7]])         # one reward everywhere says nothing about any prompt
    assert [next(plain) for _ in range(10)] == [next(preferring) for _ in range(10)]


def test_the_chance_of_a_prompt_is_the_formula_of_the_docstring():
    generator = random.Random(0)
    prompts = [f"prompt {i}" for i in range(5)]
    rounds = [[[generator.choice([0.3, 1.3, 0.5]) for _ in range(4)] for _ in prompts] for _ in range(3)]
    memory, all_of = PromptMemory(), {prompt: [] for prompt in prompts}
    for groups in rounds:
        memory.record(prompts, groups)
        for prompt, group in zip(prompts, groups):
            all_of[prompt] += group
    lowest, highest = 0.3, 1.3
    for prompt, rewards in all_of.items():
        expected = 4 * statistics.pvariance([*rewards, lowest, highest]) / (highest - lowest) ** 2
        assert memory.probability(prompt) == pytest.approx(expected, rel=1e-12) and 0 < expected <= 1
    assert memory.probability("never asked") == 1.0


@pytest.mark.parametrize("offset,scale", [(0.0, 1.0), (-2.0, 5.0)])
def test_with_two_rewards_the_chance_is_that_of_laplaces_success_rate(offset, scale):
    memory, count = PromptMemory(), 8
    for right in range(count + 1):
        memory.record([f"{right} right"], [[offset + scale * (i < right) for i in range(count)]])
    for right in range(count + 1):
        p = (right + 1) / (count + 2)
        assert memory.probability(f"{right} right") == pytest.approx(4 * p * (1 - p))
    assert memory.probability("4 right") == pytest.approx(1.0) and memory.probability("new") == 1.0
    four_failures = PromptMemory()
    four_failures.record(["a", "b"], [[0.0] * 4, [1.0]])
    assert four_failures.probability("a") == pytest.approx(0.5556, abs=1e-4), "what the docstring says"


def test_a_memory_leaves_out_what_could_not_be_scored_and_knows_prompts_by_what_they_say():
    memory, other = PromptMemory(), PromptMemory()
    memory.record(["a b", "c"], [[0.0, float("nan"), 1.0], [float("nan")] * 3])
    other.record(["A\nb"], [[0.0, 1.0]])
    assert memory.probability("a b") == other.probability("a  b") and (memory.lowest, memory.highest) == (0.0, 1.0)
    assert memory.probability("c") == 1.0
    memory.record([[5, 6]], [[1.0, 1.0]])                 # a truncated prompt is token ids
    assert memory.probability([5, 6]) == 0.75 and memory.probability([5, 7]) == 1.0


def test_prompts_are_handed_out_by_their_chance_and_none_is_ever_forgotten():
    memory, examples = PromptMemory(), examples_of("never", "mixed", "always", "new")
    memory.record(["never", "mixed", "always"], [[0.0] * 8, [0.0, 1.0] * 4, [1.0] * 18])
    batches = ShuffledBatches(examples, 5, seed=0, memory=memory)
    counts = Counter(example["prompt"] for _ in range(1000) for example in next(batches))
    epochs = batches.position / 4
    assert abs(counts["mixed"] - epochs) <= 1 and abs(counts["new"] - epochs) <= 1
    for prompt in "never", "always":
        p = 1 / 10 if prompt == "never" else 19 / 20
        expected = 4 * p * (1 - p) * epochs
        assert abs(counts[prompt] - expected) < 4 * expected**0.5


def test_position_and_memory_are_the_whole_state():
    def outcome(prompt, at):
        return [float((hash_of(prompt) + i + at) % 3 == 0) if prompt > "5" else 0.0 for i in range(4)]

    def hash_of(prompt):
        return sum(map(ord, prompt))

    def go_on(batches, steps):
        taken = []
        for _ in range(steps):
            batch = next(batches)
            batches.memory.record([e["prompt"] for e in batch], [outcome(e["prompt"], batches.position) for e in batch])
            taken += [e["prompt"] for e in batch]
        return taken

    examples = examples_of(*map(str, range(10)))
    whole = ShuffledBatches(examples, 3, 7, PromptMemory())
    first, rest = go_on(whole, 9), None
    state = json.loads(json.dumps(vars(whole.memory)))    # plain numbers and nothing else
    resumed = ShuffledBatches(examples, 3, 7, PromptMemory(**state))
    resumed.position = whole.position
    rest = go_on(whole, 12)
    assert go_on(resumed, 12) == rest and whole.position == resumed.position > (9 + 12) * 3, "some were passed over"
    assert go_on(ShuffledBatches(examples, 3, 7, PromptMemory()), 21) == first + rest


@pytest.mark.slow
def test_a_run_that_prefers_mixed_prompts_remembers_them_when_it_is_resumed(tmp_path, monkeypatch):
    (tmp_path / "some.py").write_text(                    # half of the prompts earn nothing, whatever is answered
        "def some(completions, prompts, **columns):\n"
        "    return [float(len(c) % 2 * int(p[0]) % 2) for c, p in zip(completions, prompts)]\n"
    )
    flags = (
        f"--use_grpo --cold_start_steps 0 --limit 8 --eval_limit 0 --num_epochs 9 --max_steps 9 --learning_rate 1e-3 "
        f"--save_steps 0 --prefer_mixed --reward_functions {tmp_path}/some.py:some"
    ).split()
    positions, real = {}, Run.log_step

    def note(run, *rest):
        real(run, *rest)
        positions[run.folder.path.name, run.progress.step] = run.batches.position, dict(run.progress.prompt_memory.earned)

    monkeypatch.setattr(Run, "log_step", note)
    whole = run_folder(tmp_path / "whole", *flags)

    def stop(run, *rest):
        note(run, *rest)
        if run.progress.step == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "log_step", stop)
    stopped = run_folder(tmp_path / "stopped", *flags)
    monkeypatch.setattr(Run, "log_step", note)
    train.main(["--output_dir", str(stopped), "--resume"])
    assert comparable(stopped) == comparable(whole)
    assert all(positions["whole", step] == positions["stopped", step] for step in range(1, 10))
    position, earned = positions["whole", 9]
    assert position > 9 * 4 and sum(count for count, *_ in earned.values()) == 9 * 4 * 4 and len(earned) == 8
    for (name, left), (_, right) in zip(weights_of(whole).items(), weights_of(stopped).items(), strict=True):
        assert left.equal(right), name


def test_what_dynamic_sampling_replaces_is_remembered_too(tmp_path):
    (tmp_path / "none.py").write_text("def none(completions, **columns):\n    return [0.5] * len(completions)\n")
    flags = f"--use_grpo --cold_start_steps 0 --dynamic_sampling 2 --reward_functions {tmp_path}/none.py:none"
    run = start_run(tmp_path, *flags.split())
    train.grpo_training_step(run, next(run.batches))
    earned = run.progress.prompt_memory.earned
    assert len(earned) == 3 * 4 and set(earned.values()) == {(4, 2.0, 1.0)}
