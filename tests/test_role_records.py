"""A role's record names a class that works as that role."""

from __future__ import annotations

import pytest

from halfmoon.cli.processes.worker import class_of
from halfmoon.schemas.roles import ROLES, WORKER_ROLES, WorkerRole


@pytest.mark.parametrize("role", WORKER_ROLES)
def test_the_class_of_a_workers_record_has_its_role(role: WorkerRole) -> None:
    assert class_of(role).role == role


def test_a_role_without_a_class_is_run_by_a_command_of_its_own() -> None:
    assert {role for role, traits in ROLES.items() if traits.worker == ("", "")} == {*ROLES} - {*WORKER_ROLES}
