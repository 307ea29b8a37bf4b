"""A stage's sources are parsed while other threads parse as well, as those of Prefect do."""

import ast

import pytest

from tasks.engine import sources

TEXT = "import os\n"


def test_a_count_that_the_interpreter_lost_is_counted_again(monkeypatch):
    """Python 3.11.7 and older fail now and then where two threads parse (gh-106905)."""
    expected, real, calls = ast.dump(ast.parse(TEXT)), ast.parse, []

    def losing(source, *others):
        calls.append(source)
        if source == TEXT and len(calls) < 3:
            raise SystemError("AST constructor recursion depth mismatch (before=93, after=77)")
        return real(source, *others)

    monkeypatch.setattr(ast, "parse", losing)
    assert ast.dump(sources._tree(TEXT)) == expected
    assert len(calls) == 3


def test_what_fails_each_time_is_an_error(monkeypatch):
    real = ast.parse

    def failing(source, *others):
        if source == TEXT:
            raise SystemError("depth")
        return real(source, *others)

    monkeypatch.setattr(ast, "parse", failing)
    with pytest.raises(SystemError):
        sources._tree(TEXT)


def test_what_is_no_python_is_an_error():
    with pytest.raises(SyntaxError):
        sources._tree("def")
