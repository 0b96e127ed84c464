"""Subjects: what is sent is legal for NATS and matches the filters of those who should get it, and nobody
else's.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import DECISION_TYPES
from halfmoon.schemas.events import EVENT_TYPES
from halfmoon.schemas.kv import KV_TYPES
from halfmoon.schemas.types import ID_PATTERN

IDS = st.from_regex(ID_PATTERN)
EVENT_NAMES = [kind.__name__ for kind in EVENT_TYPES]
DECISION_NAMES = [kind.__name__ for kind in DECISION_TYPES]
KV_NAMES = [kind.__name__ for kind in KV_TYPES]


def matches(pattern: str, subject: str) -> bool:
    """As nats-server matches: `*` is one token, `>` at the end one or more."""
    wanted, given_ = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(given_) >= len(wanted) and all(map(same, wanted[:-1], given_))
    return len(given_) == len(wanted) and all(map(same, wanted, given_))


def same(wanted: str, token: str) -> bool:
    return wanted in ("*", token)


def all_of(process_id: str) -> list[str]:
    """Every subject that a name can be part of."""
    return [
        *(subjects.event(process_id, name) for name in EVENT_NAMES),
        *(subjects.decision(process_id, name) for name in DECISION_NAMES),
        *(subjects.kv(process_id, name, "other") for name in KV_NAMES),
        *(subjects.kv("other", name, process_id) for name in KV_NAMES),
        subjects.give(process_id, "other"),
        subjects.give("other", process_id),
        subjects.take(process_id, "other"),
        subjects.take("other", process_id),
        subjects.tokens(process_id, "other"),
        subjects.tokens("other", process_id),
        subjects.resend(process_id, "other"),
        subjects.resend("other", process_id),
        subjects.store(process_id, "lease"),
        subjects.status(process_id),
    ]


@given(process_id=IDS)
def test_every_id_is_one_token_of_a_legal_subject(process_id: str) -> None:
    found = all_of(process_id)
    assert len(set(found)) == len(found)
    for subject in found:
        tokens = subject.split(".")
        assert tokens[0] == subjects.ROOT
        assert tokens.count(process_id) >= 1
        assert all(re.fullmatch(r"[A-Za-z0-9_-]+", token) for token in tokens)
        assert len(subject) < 200


@pytest.mark.parametrize(
    "bad", ["", "a.b", "a b", "a\tb", "*", ">", "a\n", "a\r\n", "\u00e9", "a" * 81, "$JS"]
)
def test_no_id_can_carry_what_a_subject_may_not(bad: str) -> None:
    assert re.search(ID_PATTERN, bad) is None


@given(process_id=IDS)
def test_the_streams_take_what_is_theirs_and_nothing_else(process_id: str) -> None:
    streams = {"events": subjects.EVENTS_ALL, "decisions": subjects.DECISIONS_ALL, "kv": subjects.KV_ALL}
    for subject in all_of(process_id):
        plane = subject.split(".")[1]
        assert [name for name, pattern in streams.items() if matches(pattern, subject)] == [plane] * (
            plane in streams
        )


@given(process_id=IDS, other_id=IDS)
def test_a_filter_for_one_process_matches_only_its_subjects(process_id: str, other_id: str) -> None:
    for one, everything, names in (
        (subjects.decision, subjects.decisions_for, DECISION_NAMES),
        (lambda one, name: subjects.kv(one, name, "n1"), subjects.kv_for, KV_NAMES),
    ):
        for name in names:
            assert matches(everything(process_id), one(process_id, name))
            assert matches(everything(process_id), one(other_id, name)) == (process_id == other_id)


@given(node_id=IDS, verb=IDS)
def test_a_store_agent_can_listen_to_all_of_its_verbs(node_id: str, verb: str) -> None:
    assert matches(subjects.store(node_id, "*"), subjects.store(node_id, verb))
    assert not matches(subjects.store("another.", "*"), subjects.store(node_id, verb))


@given(process_id=IDS)
def test_one_question_reaches_every_process(process_id: str) -> None:
    assert matches(subjects.status("*"), subjects.status(process_id))


def test_the_client_api_is_apart_from_all_inner_subjects() -> None:
    for subject in (f"{subjects.API}.generate", f"{subjects.API}.status"):
        assert not any(
            matches(pattern, subject)
            for pattern in (
                subjects.EVENTS_ALL,
                subjects.DECISIONS_ALL,
                subjects.KV_ALL,
                subjects.status("*"),
            )
        )
