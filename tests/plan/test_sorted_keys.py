import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_memo.plan import sorted_keys
from ds_memo.plan.sorted_keys import SortedKeys


@given(st.lists(st.integers(0, 30), max_size=200))
def test_it_does_what_a_sorted_list_does(changes):
    """Each number is added, or removed if it is present."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_keys, "LONGEST", 3)
        keys, plain = SortedKeys(), set()
        for key in changes:
            if key in plain:
                keys.remove(key)
            else:
                keys.add(key)
            plain ^= {key}
            for probe in range(-1, 32):
                assert keys.ceiling(probe) == min((k for k in plain if k >= probe), default=None)
                below, above = (
                    max((k for k in plain if k < probe), default=None),
                    min((k for k in plain if k > probe), default=None),
                )
                assert keys.neighbours(probe) == (below, above)


@pytest.mark.parametrize("absent", [1, 9])
def test_a_key_that_is_not_there(absent):
    keys = SortedKeys()
    keys.add(5)
    with pytest.raises(KeyError):
        keys.remove(absent)


def test_no_list_grows_beyond_its_limit():
    keys = SortedKeys()
    for k in range(5000):
        keys.add(k * 7919 % 5000)
    assert max(map(len, keys._lists)) <= sorted_keys.LONGEST
