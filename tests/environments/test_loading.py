"""Choosing an environment by name or file, and the columns that it needs."""

import pytest

from environments.instances import refuse_missing_columns, responders


def test_an_environment_gets_the_columns_it_asks_for():
    examples = [{"prompt": "p", "completion": "c", "topic": "t", "answer": "3"}, {"prompt": "q", "answer": "4"}]
    (first, second) = responders(lambda conversation, topic: (conversation, topic), examples)
    assert first("x") == ("x", "t") and second("x") == ("x", None)
    (first, _) = responders(lambda conversation, **columns: columns, examples)
    assert first([]) == {"topic": "t", "answer": "3"}, "never the demonstration"
    (first, _) = responders(lambda conversation, level, topic=1: (level, topic), examples)
    assert first([]) == (None, "t"), "other examples have the column"
    with pytest.raises(ValueError, match="--environment=mine: needs the column level"):
        refuse_missing_columns("mine", lambda conversation, level, topic=1: None, examples)
    refuse_missing_columns("mine", lambda conversation, topic: None, examples)
