"""Shape comments of the core files are true: steps are traced, and each comment is compared with what its statement assigned."""

import ast
import re
import sys
import tokenize
from collections import Counter, namedtuple

import pytest
from conftest import ROOT, length_reward, start_run

import train

FILES = "train.py", "experience.py", "policy.py", "logprobs.py", "sample.py", "grpo.py", "rewards.py", "data.py"
CORE = {str(ROOT / name): (ROOT / name).read_text() for name in FILES}
SHAPE = r"\((?:\w+,|\w+(?:, \w+)+)\)"                         # (b,) or (P, G)
Comment = namedtuple("Comment", "place shapes lines target")  # on a statement: target is "" if it returns


def read_comments(sources):
    """Return the comments that begin with a shape: of statements by file and line, of fields by class and name."""
    comments = {}
    for path, source in sources.items():
        tokens = tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
        shapes = {t.start[0]: found[1] for t in tokens if (found := re.match(f"# ({SHAPE}(?: or {SHAPE})*)", t.string))}
        nodes = [*ast.walk(ast.parse(source))]
        class_of = {child: node.name for node in nodes if isinstance(node, ast.ClassDef) for child in node.body}
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return):
                target = ast.unparse(getattr(node, "targets", [getattr(node, "target", [])])[0])
                lines = range(node.lineno, node.end_lineno + 1)
                keys = [(class_of[node], target)] if node in class_of else [(path, line) for line in lines]
                for line in shapes.keys() & {lines[0], lines[-1]}:
                    comments |= dict.fromkeys(keys, Comment(f"{path}:{line}", shapes[line], lines, target))
    return comments


def shapes_of(value):
    """Return the shape of a tensor, or that of each one in a list or dict. None has none: the tensor is optional."""
    if type(value) in (list, tuple, dict):                # and not torch.Size, which is a shape itself
        return [shape for part in (value.values() if type(value) is dict else value) for shape in shapes_of(part)]
    return [] if value is None else [tuple(getattr(value, "shape", value))]


def trace(sources, call):
    """Return call(), and (comment, shape, scope) for each value. A scope is a call, a repetition in its loops, or an object."""
    comments, results, frames = read_comments(sources), [], {}

    def on_event(frame, event, arg):
        path, line = frame.f_code.co_filename, frame.f_lineno
        if path not in sources or frame.f_code.co_name[0] == "<":                # such as <genexpr>
            return None
        current, repeats = frames.get(frame, (None, Counter()))
        if current and (event == "return" or (event == "line" and current.target and line not in current.lines)):
            value = eval(current.target, frame.f_globals, frame.f_locals) if current.target else arg
            results.extend((current, shape, (frame, repeats[current])) for shape in shapes_of(value))
            repeats[current] += 1
            current = None
        frames[frame] = (current or comments.get((path, line))) if event == "line" else None, repeats  # None if it raised
        for value in (arg, *frame.f_locals.values()) if event == "return" else ():
            fields = [comment for (kind, _), comment in comments.items() if kind == type(value).__name__]
            results.extend((c, shape, (frame, id(value))) for c in fields for shape in shapes_of(getattr(value, c.target)))
        return on_event

    sys.settrace(on_event)
    try:
        return call(), results
    finally:
        sys.settrace(None)


def wrong(results, sizes):
    """Return the wrong comments by place. Names without a size, and B in grpo.py ("or some of them"), hold for one scope."""
    found, scopes = {}, {}
    for comment, shape, scope in results:
        known = {d: n for d, n in sizes.items() if d != "B" or "/grpo.py" not in comment.place}
        names = scopes.setdefault(scope, {str(n): n for n in range(10)} | known)
        options = [re.findall(r"\w+", one) for one in re.findall(SHAPE, comment.shapes)]
        if not any(all(names.setdefault(d, n) == n for d, n in zip(o, shape)) for o in options if len(o) == len(shape)):
            found.setdefault(comment.place, f"{comment.shapes} is {shape}")
    return found


@pytest.mark.parametrize("step, at_least, flags", [
    (train.supervised_training_step, 20, ""),
    (train.grpo_training_step, 45, ""),
    (train.grpo_training_step, 55, "--use_kl_penalty --kl_in reward --use_value_head --importance_cap 2 --loss_type gspo"),
    (train.grpo_training_step, 50, "--use_kl_penalty --kl_estimator exact --baseline leave_one_out --generation_top_k 20")])
def test_the_shape_comments_of_a_step_are_true(tmp_path, step, at_least, flags):
    """All sizes are different, but for B = P of demonstrations. A GRPO update has several micro-batches of b < B rows."""
    flags += f" --engine plain --batch_size 5 --max_tokens_per_forward 150 --reward_functions {length_reward(tmp_path)}"
    run = start_run(tmp_path, "--use_grpo", *flags.split())
    (_, experience), results = trace(CORE, lambda: step(run, next(run.batches)))
    rollout, head = experience.table.rollout, run.policy.model.get_output_embeddings()
    (P, Tp), (B, T), (V, H) = rollout.prompt_ids.shape, rollout.completion_ids.shape, head.weight.shape
    sizes = dict(P=P, G=B // P, B=B, Tp=Tp, T=T, V=V, H=H)
    assert wrong(results, sizes) == {}
    assert len(wrong(results, dict.fromkeys(sizes, -1))) >= at_least - 5, "with wrong sizes nearly all are wrong"
    assert len(set(sizes.values())) == 7 - (B == P) and len({comment for comment, *_ in results}) >= at_least
