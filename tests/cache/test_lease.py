"""A layer that needs more experts than there are slots: each is fetched once, and its slot is soon used again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.lease import leases
from core.policy.allocation.slots import WAVES, waves


@given(st.sets(st.integers(0, 30), min_size=1), st.sets(st.integers(0, 30)), st.integers(1, 40))
def test_as_many_are_leased_ahead_as_fit_and_nothing_is_fetched_twice(
    wanted: set[int], resident: set[int], room: int
) -> None:
    resident = set(sorted(resident)[:room])
    here, leased = set(resident), list[int]()
    fetched, computed, looked = list[int](), list[int](), list[int]()

    def acquire(group: list[int]) -> list[int]:
        leased.extend(group)
        assert len(leased) <= room
        for expert in group:
            if expert not in here:
                fetched.append(expert)
                if len(here) == room:
                    here.remove(min(here - set(leased)))  # there is one
                here.add(expert)
        return group

    def release(group: list[int]) -> None:
        del leased[: len(group)]

    groups = waves(sorted(wanted), room, lambda expert: expert not in here)
    for group in leases(groups, room, acquire, release, lambda: looked.append(len(fetched))):
        assert leased[: len(group)] == group and set(group) <= here
        computed += group
        unused = [one for one in wanted - set(computed) - set(leased) if one not in here]
        following = next((each for each in groups if set(each) <= set(unused)), None)
        assert following is None or len(leased) + len(following) > room, "more could be fetched during that"
    assert sorted(computed) == sorted(wanted)
    assert sorted(fetched) == sorted(wanted - resident)
    assert looked == [len(fetched)] and not leased


@pytest.mark.parametrize(
    ("room", "size", "residents"),
    [(32, 4, [4, 4, 8, 16]), (9, 1, [1, 1, 2, 4, 8, 9, 7]), (3, 1, [1, 1, 2, *[3] * 9, 1])],
)
def test_groups_of_residents_grow_and_those_to_fetch_are_small(room: int, size: int, residents: list[int]) -> None:
    """No group is larger than the room; more residents than that are pinned."""
    assert room // WAVES in (size, 0)
    groups = waves(range(64), room, lambda expert: expert % 2 == 0)
    assert [len(group) for group in groups if group[0] % 2] == residents
    assert {len(group) for group in groups if group[0] % 2 == 0} == {size}
    order = [expert for group in groups for expert in group]
    assert order == [*range(1, 64, 2), *range(0, 64, 2)]
