"""
A shell for SQL: every conversation has a database of its own in memory, and its content at the end is checked.

    python train.py examples/sql_shell.json
    python infer.py --chat --questions examples/sql_shell.jsonl --environment examples/sql_shell.py:Shell --max_turns 6

A row of the data has the prompt, `setup` (SQL that makes the tables), and `check` and `result`: a query, and the rows that it has to
give at the end. SQL of a model has no access to files, and ends after a number of steps: no time limit interrupts sqlite3, which is C.
"""

import sqlite3

MOST_STEPS = 10**6              # of sqlite's virtual machine, for a statement
MOST_BYTES = 10**6              # of a text or blob
MOST_ROWS = 20                  # of a result that are shown
DENIED = sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA


class Shell:
    """1 point at the end if the check gives the expected rows, else 0."""

    def reset(self, setup, check, result, **columns):
        """Make the tables, and show how they were made."""
        self.check, self.result = check, [tuple(row) for row in result]
        self.database = sqlite3.connect(":memory:", isolation_level=None)
        self.database.executescript(setup)
        self.database.set_authorizer(lambda action, *_: sqlite3.SQLITE_DENY if action in DENIED else sqlite3.SQLITE_OK)
        self.database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        self.database.set_progress_handler(self._stop, 1000)
        tables = self._query("SELECT sql FROM sqlite_master WHERE sql NOT NULL")
        return "\n" + "\n".join(sql for (sql,) in tables)

    def run(self, sql: str) -> str:
        """
        Run one statement of SQL and return its rows.

        Args:
            sql: A statement in the dialect of SQLite.
        """
        rows = self._query(sql)
        more = "\n..." if len(rows) > MOST_ROWS else ""
        return "\n".join(" | ".join(map(str, row)) for row in rows[:MOST_ROWS]) + more or "done"

    def get_reward(self) -> float:
        """Check the content of the database."""
        try:
            return float(self._query(self.check) == self.result)
        except sqlite3.Error:                             # a table is gone
            return 0.0

    def close(self):
        """Free the database."""
        self.database.close()

    def _query(self, sql):
        self.steps_left = MOST_STEPS
        return self.database.execute(sql).fetchmany(MOST_ROWS + 1)

    def _stop(self):
        self.steps_left -= 1000
        return self.steps_left < 0
