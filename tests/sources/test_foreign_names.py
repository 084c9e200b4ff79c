"""Names of other systems: each is answered with flags that exist; dev/five-systems.md is typed as it stands."""

import json
import re
import shlex
from pathlib import Path

import pytest

import train
from analysis.infer_flags import parse_arguments
from config import FLAGS, SECTIONS, Config
from runs.command_line import parse_config
from sources import foreign_names
from sources.foreign_names import explain_unknown

PAGE = (Path(__file__).parents[2] / "docs/coming-from.md").read_text()
FIVE = (Path(__file__).parents[2] / "dev/five-systems.md").read_text()
PARTS = {part.partition("\n")[0]: part for part in FIVE.partition("## Their settings")[0].split("## ")[1:]}
RUN_AS_THEY_ARE = "Tunix on PyTorch/XLA (Gemma 2), and its GRPO summary"
NAMES = {section.__name__: section for section in SECTIONS} | {"TunixConfig": Config, "GRPOTrainingConfig": Config.of}


def typed(system):
    """Commands, settings and Python expressions of a system on the page."""
    block = PARTS[system].partition("```text\n")[2].partition("```")[0]
    block = re.sub(r",\n ", ", ", block)                  # settings of several lines
    lines = block.splitlines()
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("python ")]
    settings = [json.loads(line) for line in lines if line.startswith("{")]
    expressions = [line for line in lines if line[0].isupper()]
    assert commands and settings and expressions and len(commands + settings + expressions) == len(lines)
    return commands, settings, expressions


def answer_of(call, *arguments):
    """The error of one line, None without an error."""
    try:
        call(*arguments)
    except (ValueError, TypeError) as error:
        assert "\n" not in str(error)
        return str(error)


def file_of(settings, folder):
    (folder / "settings.json").write_text(json.dumps(settings))
    return str(folder / "settings.json")


def test_what_the_first_system_types_runs(tmp_path):
    commands, settings, expressions = typed(RUN_AS_THEY_ARE)
    for number, words in enumerate([*commands, [file_of(settings[0], tmp_path)]]):
        short = "--max_steps 1 --cold_start_steps 0 --limit 20 --eval_limit 4 --batch_size 2 --report_to none --output_dir"
        train.main([*words, *short.split(), str(tmp_path / f"run{number}")])
        assert (tmp_path / f"run{number}/final/model.safetensors").exists()
    (config,) = (eval(expression, NAMES) for expression in expressions)
    assert config.training.use_grpo and config.grpo.generation_max_length == 256 and config.training.profile == "demo"


@pytest.mark.parametrize("system", [name for name in PARTS if name != RUN_AS_THEY_ARE])
def test_what_the_others_type_is_answered_in_one_line_that_has_a_flag_for_each_name(system, tmp_path):
    commands, settings, expressions = typed(system)
    asked = [(parse_config, words, [w[2:] for w in words if w.startswith("--")]) for words in commands]
    asked += [(parse_config, [file_of(s, tmp_path)], list(s)) for s in settings]
    asked += [(lambda text: eval(text, NAMES), text, re.findall(r"(\w+)=", text)) for text in expressions]
    for call, argument, names in asked:
        answer, foreign = answer_of(call, argument), [name for name in names if name not in FLAGS]
        assert len(foreign) > 1 and answer.endswith("(more in docs/coming-from.md)")
        for name in foreign:
            (said,) = [part for part in answer.replace(";", "|", answer.count("is a field of")).split("|") if f"{name}: unknown" in part]
            assert re.search(r"here .*--\w+", said), said


@pytest.mark.parametrize("system", [name for name in PARTS if name != RUN_AS_THEY_ARE])
def test_the_settings_that_the_page_gives_instead_are_accepted(system, tmp_path):
    (here,) = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PARTS[system], flags=re.DOTALL))
    config = parse_config([file_of(here, tmp_path)])
    assert config == Config.of(**here) and config.training.use_grpo


def test_iterations_of_rollouts_are_counted_in_optimiser_steps():
    """What the page says: 1000 rollouts of 256 x 4 completions, 2 epochs in minibatches of 64, are 32,000 steps."""
    (here,) = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PARTS["ReLax"], flags=re.DOTALL))
    there = typed("ReLax")[1][0]
    per_rollout = Config.of(**here).updates_per_rollout
    assert here["max_steps"] == there["num_iterations"] * per_rollout == 32_000
    assert here["reference_update_freq"] == there["reference_update_freq"] * per_rollout


def test_every_answer_names_flags_that_exist_and_no_flag_is_in_the_table():
    infer, table = {"question", "chat", "evaluate", "samples"}, foreign_names.foreign_names()
    for here in table.values():
        assert set(re.findall(r"--(\w+)", here)) <= set(FLAGS) | infer | {"nproc_per_node"}, here
    assert not set(table) & set(FLAGS)
    parser = parse_arguments.__globals__["build_parser"]()
    known = set(FLAGS) | {action.dest for action in parser._actions}
    for name, here in table.items():
        assert explain_unknown([name], known).startswith(f"{name}: unknown flag; here {here}")
    lines = [line for line in PAGE.partition("## Names")[2].splitlines() if line.startswith("| ")][1:]
    listed = [name for line in lines for name in line.split("|")[1].strip().split(", ")]
    assert len(listed) == len(set(listed)) == len(table) > 130 and all(line.count("|") == 4 for line in lines)


def test_without_the_page_a_foreign_name_is_an_unknown_flag(monkeypatch, tmp_path):
    monkeypatch.setattr(foreign_names, "PAGE", tmp_path / "not installed.md")
    foreign_names.foreign_names.cache_clear()
    assert explain_unknown(["--xyzzy"], FLAGS) == "--xyzzy: unknown flag; see --help"
    assert explain_unknown(["--beta"], []) == "--beta: unknown flag; see --help"
    foreign_names.foreign_names.cache_clear()


@pytest.mark.parametrize("typed,answer", [
    ("--kl_coef", "--kl_penalty_coef"), ("--group-size", "--num_completions_per_prompt"), ("--beta=0.1", "--kl_penalty_coef"),
    ("actor_rollout_ref.rollout.n=8", "--num_completions_per_prompt"), ("actor_rollout_ref.actor.optim.lr=1e-6", "--learning_rate"),
    ("--num_generation", "--num_completions_per_prompt"),            # misspelt
    ("--nnodes", "torchrun"),
    ("--max_new_tokens", "--generation_max_length"), ("--micro_batch_size", "--max_tokens_per_forward"),
])
def test_a_foreign_name_is_answered_however_it_is_spelt(typed, answer):
    with pytest.raises(ValueError, match=f"{re.escape(typed)}: unknown flag; here {answer}"):
        parse_config([typed, "--use_grpo"])


def test_a_value_with_an_equals_sign_is_not_answered_as_a_name():
    with pytest.raises(ValueError) as error:
        parse_config(["--use_grpo", "--mesh_shape", "fsdp=2"])
    assert str(error.value).count("unknown flag") == 1
    with pytest.raises(ValueError, match=r"2\+2=\?: belongs to no flag"):
        parse_arguments(["--chat", "2+2=?"])


def test_a_name_with_several_meanings_gets_all_of_them_and_an_unknown_one_the_nearest_flag():
    iterations = explain_unknown(["num_iterations"], FLAGS)
    assert "--ppo_epochs for TRL's" in iterations and "--max_steps" in iterations and "times ppo_epochs" in iterations
    assert explain_unknown(["--learning_rat"], FLAGS) == "--learning_rat: unknown flag; did you mean --learning_rate?"
    assert explain_unknown(["--xyzzy"], FLAGS) == "--xyzzy: unknown flag; see --help"


def test_a_name_that_is_only_somewhat_like_one_of_another_system_is_not_answered_as_that():
    assert explain_unknown(["--num_generation"], FLAGS).startswith("--num_generation: unknown flag; here --num_completions_per_prompt")
    assert explain_unknown(["--dataset_configuration_x"], FLAGS) == "--dataset_configuration_x: unknown flag; see --help"


def test_infer_answers_with_its_own_flags_alone():
    with pytest.raises(ValueError, match="--max_new_tokens: unknown flag; here --generation_max_length"):
        parse_arguments(["--question", "1+1", "--max_new_tokens", "5"])
    with pytest.raises(ValueError, match="--lora_r: unknown flag; see --help"):
        parse_arguments(["--question", "1+1", "--lora_r", "5"])
