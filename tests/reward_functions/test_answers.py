"""Which part of a completion is read."""

from reward_functions import answers


def test_the_block_is_the_last_one_of_the_answer_or_of_the_text():
    block = "```python\n{}\n```"
    assert answers.extract_block("x = 1", "python") == "x = 1"
    assert answers.extract_block(f"a {block.format('x = 1')} b {block.format('x = 2')} c", "python") == "x = 2\n"
    assert answers.extract_block(f"{block.format('x = 1')}<answer>{block.format('x = 2')}</answer>", "python") == "x = 2\n"
    assert answers.extract_block("```java\nint x;\n```", "python") == "```java\nint x;\n```"
