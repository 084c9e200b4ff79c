"""The columns prompt, answer and completion from those that flags name, and from usual ones."""

import re
from collections import Counter
from collections.abc import Mapping

from data import as_map
from sources.published_forms import FORMS

COLUMNS = {                     # the column names that are recognised, in order of precedence
    "prompt": ("prompt", "question", "problem", "instruction", "messages", "conversations"),
    "answer": ("answer", "final_answer", "solution", "target", "answerKey"),
    "completion": ("completion", "response", "output", "canonical_solution"),
}
BRACES = re.compile(r"\{([^{}]+)\}")                     # a column in the text of a prompt
STATED = re.compile(r"\S\s+(the|\W*final) answer(:| is)|\S\s+\W*answer: \S", re.IGNORECASE)


class Row(dict):
    """A row with its `number` in the source, and the names of the columns that were `read`."""

    number, read = 0, frozenset()


def as_published(given, number: int, columns: dict[str, str], counts: Counter) -> Row:
    """Return a row with prompt, answer and completion, each from the column that `columns` name, else from
    the first of COLUMNS with a value; published forms are converted, and counted.
    """
    given = given if isinstance(given, Mapping) else {"prompt": given}
    row, read = Row(given), set()
    for name, usual in COLUMNS.items():
        if chosen := columns.get(name):
            row[name], names = cell(given, chosen)
            if not names:
                raise ValueError(f"--{name}_column={chosen}: the row has the columns {', '.join(given)}")
        else:
            names = [c for c in usual if given.get(c) is not None and c not in columns.values()][:1]
            if names:
                row[name] = given[names[0]]
        read |= {name, *names}
    chosen_by_flag = {name for name, chosen in columns.items() if chosen and chosen not in COLUMNS[name]}
    solution = f"{row.get('solution')} {row.get('answer')}"
    for name, (needed, sign, convert) in FORMS.items():
        if needed <= row.keys() and sign in solution and (changed := convert(row)):
            row |= {key: value for key, value in changed.items() if key not in chosen_by_flag}
            read |= needed | {*changed} | ({"solution"} if sign else set())
            counts[name] += 1
    if isinstance(row.get("answer"), str) and STATED.search(row["answer"]):
        raise ValueError(
            f"the answer is a whole solution, ...{row['answer'][-30:]!r}: "
            + as_map("answer", "row['...'].split('answer is')[-1].strip(' :.')"))
    row.number, row.read = number, read
    return row


def cell(row: Mapping, column: str) -> tuple:
    """Return the value of a column, and the names of the columns that it is made of; none if there is none.

    column  a name; the path of a nested field, "a.b" of {"a": {"b": 1}}; or a text with columns in braces.
            Other braces, such as {"x": 1}, are kept, unless they hold a single word
    """
    if column in row:
        return row[column], [column]
    found = {name: cell(row, name) for name in BRACES.findall(column)}
    texts = {name: in_text(name, value) for name, (value, read) in found.items() if read}
    for name in found.keys() - texts:
        if (word := re.match(r"(\w+)[!:]", name)) and word[1] in row:
            raise ValueError(f"{{{name}}}: formats are not supported; write {{{word[1]}}}")
    if texts and not any(name.isidentifier() for name in found.keys() - texts):
        read = [name for _, names in found.values() for name in names]
        return BRACES.sub(lambda match: texts.get(match[1], match[0]), column), read
    head, _, field = column.partition(".")
    inside = row.get(head) if field else None
    value, read = cell(inside, field) if isinstance(inside, Mapping) else (None, [])
    return value, [head] if read else []


def in_text(name: str, value) -> str:
    """Return a value as it is written in a prompt; nothing for None. Raises ValueError for dates and such."""
    if not isinstance(value, str | int | float | list | None):
        raise ValueError(
            f"{{{name}}} is the {type(value).__name__} {value!r:.40}, not text: {as_map(name, 'str(...)')}")
    return "" if value is None else str(value)
