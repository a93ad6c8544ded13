"""JSON as it is written."""

import json

from hypothesis import given
from hypothesis import strategies as st

from checkpoints.manifest import readable

LEAVES = st.none() | st.booleans() | st.integers() | st.text(alphabet='ab[]{},"\\\n ')
VALUES = st.recursive(LEAVES, lambda v: st.lists(v) | st.dictionaries(st.text("a[],\n"), v))


@given(st.dictionaries(st.text(), VALUES))
def test_what_is_written_is_what_was_given(value):
    assert json.loads(readable(value)) == value


def test_a_list_of_numbers_takes_one_line():
    assert readable({"a": [1, 2.5], "b": [{"c": []}]}) == (
        '{\n  "a": [1, 2.5],\n  "b": [\n    {\n      "c": []\n    }\n  ]\n}\n'
    )
