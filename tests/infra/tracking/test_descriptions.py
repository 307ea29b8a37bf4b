"""Descriptions of versions in databases that have less room than SQLite."""

import pytest
from mlflow.exceptions import MlflowException

from infra.tracking.descriptions import CUT, DESCRIPTION_LENGTH, described


def database(said):
    """Takes what PostgreSQL takes of a description."""

    def call(*, description):
        said.append(description)
        if len(description) > DESCRIPTION_LENGTH:
            raise MlflowException("value too long for type character varying(5000)")
        return description

    return call


def test_what_is_too_long_is_cut_at_a_line():
    said = []
    kept = described(database(said), "a line of twenty-two.\n" * 300)
    assert len(kept) <= DESCRIPTION_LENGTH
    assert kept.endswith(f"a line of twenty-two.\n{CUT}")
    assert [len(text) for text in said] == [6600, len(kept)]
    assert described(database([]), "short") == "short"


def test_another_error_passes_through():
    def call(*, description):
        raise MlflowException(f"no such version for {description}")

    with pytest.raises(MlflowException, match="no such version for short"):
        described(call, "short")
