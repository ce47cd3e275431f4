"""What may be given to a call as its prompts or texts, and what only looks like that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bulkrun.errors import UsageError
from bulkrun.launch.python_api.calls import refuse_one


class Frame:
    """As a table of pandas or polars is gone through: the names of its columns."""

    columns = ("text", "id")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


@pytest.mark.parametrize("given", [Frame(), pa.table({"text": ["a", "b"]})])
def test_a_table_is_not_taken_for_the_names_of_its_columns(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^a table is not a list or an iterator of texts; give one of its columns"):
        refuse_one(given, "texts")


@pytest.mark.parametrize("given", ["text", b"text", bytearray(b"text"), {"text": "a"}, 7, None, Frame])
def test_one_thing_is_not_a_list_of_its_parts(given: Any) -> None:
    with pytest.raises(UsageError, match=r"is not a list or an iterator of texts$"):
        refuse_one(given, "texts")


@pytest.mark.parametrize(
    "given", [[], ("a",), {"a"}, iter("ab"), np.array(["a"]), pa.array(["a"]), {"a": "b"}.values()]
)
def test_whatever_gives_one_after_the_other_is_taken(given: Any) -> None:
    refuse_one(given, "texts")
