"""Inductor's lookup table, filled with the team's best candidates.

By default, torch generates the code of every candidate before it measures one. If its lookup table
has an entry for a product, torch generates only the entry's candidates. This table's entry lists
the few best candidates of the team's answer that torch would generate on this host, and the
library's own kernel, which always compiles. The module `inductor` chooses among them.

In a job of several ranks the table stays empty, so that all ranks choose among the same candidates.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch._inductor import choices, config
from torch._inductor.lookup_table import (  # type: ignore[import-not-found] # of newer torch
    LookupTableChoices,
)
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.virtualized import V

from graphstash.tuning.memory.process import record_failure, team_memory
from graphstash.tuning.targets.inductor_candidates import (
    CandidateSpace,
    problem_of,
    template_identity,
)

__all__ = ["TeamChoices", "register"]

_NAME: Final = "graphstash"

_torch: Final[Any] = choices
"""Untyped, because the torch that types are checked with lacks some of it."""


def register() -> Callable[[], None]:
    """Register the team's table beside a user's table; return the function that undoes this."""
    _change_keeping_user_handler(lambda: _torch.register_inductor_choices(_NAME, TeamChoices))
    return lambda: _change_keeping_user_handler(lambda: _torch.unregister_inductor_choices(_NAME))


def _change_keeping_user_handler(change: Callable[[], None]) -> None:
    """Change torch's handler of choices, but keep a handler that the user has set.

    A handler from `V.set_choices_handler` does not use the team's table.
    """
    in_use: Any = V.choices
    settings: Any = config
    made = _torch.create_inductor_choices(settings.inductor_choices_class)
    change()
    if type(in_use) is not type(made):
        V.set_choices_handler(in_use)


class TeamChoices(LookupTableChoices):  # type: ignore[misc] # as above
    """Uses torch's look-up, key and source check on a table of one product at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    def uuid(self) -> str:
        """Return one id for all graphs, so that hosts share them for any content of the table."""
        return "graphstash 1"

    @staticmethod
    def _get_device_key(device: Any) -> str | None:
        """Return torch's key for a GPU; add one for CPUs."""
        own: Any = LookupTableChoices._get_device_key  # noqa: SLF001 - made to be overridden
        return "cpu" if device.type == "cpu" else own(device)

    def _get_lookup_table(self) -> dict[str, list[dict[str, Any]]]:
        """Return the team's entries, overridden by the user's table."""
        return {**getattr(self._of_thread, "table", {}), **super()._get_lookup_table()}

    def _finalize_template_configs(
        self,
        template_choices: dict[str, Iterator[Any]],
        kernel_inputs: Any,
        templates: list[Any],
        op_name: str,
        kwarg_overrides: dict[str, dict[str, Any]] | None = None,
    ) -> list[Any]:
        offered = {uid: list(each) for uid, each in template_choices.items()}
        # torch's look-up drops the overrides.
        if not any((kwarg_overrides or {}).values()):
            try:
                self._of_thread.table = self._make_table(offered, kernel_inputs, op_name)
            except Exception as error:  # noqa: BLE001 - the cache's outermost frame
                record_failure(f"{op_name} is tuned without the team's table", error)
        try:
            again = {uid: iter(each) for uid, each in offered.items()}
            taken: list[Any] = super()._finalize_template_configs(
                again, kernel_inputs, templates, op_name, kwarg_overrides
            )
            return taken
        finally:
            self._of_thread.table = {}

    def _make_table(
        self, offered: Mapping[str, Sequence[Any]], kernel_inputs: Any, op_name: str
    ) -> dict[str, list[dict[str, Any]]]:
        """Return this product's entry; empty without a team answer or with few candidates."""
        if _NAME not in dict(_torch.registered_inductor_choices()):
            return {}  # unregistered, but threads of torch may still use this object
        all_offered = [each for several in offered.values() for each in several]
        key = self.make_lookup_key(kernel_inputs, op_name)
        memory = team_memory()
        if memory is None or key is None or len(all_offered) < 3 or not _is_tuned():
            return {}
        space = CandidateSpace(
            ((template_identity(each), each) for each in all_offered),
            complete_for=frozenset(offered),
        )
        found = memory.find(problem_of(op_name, kernel_inputs.nodes()), space)
        if found is None:
            return {}
        best = [each.configuration for each in found.best]
        listed = [space.thing(each) for each in space if each in best]
        if not listed:  # the best candidates' templates do not use the table
            return {}
        safe = [each for each in all_offered if isinstance(each.template, ExternKernelChoice)]
        return {key: [_table_entry(each) for each in dict.fromkeys([*listed, *safe])]}


def _table_entry(choice: Any) -> dict[str, Any]:
    entry = {**choice.params.to_serializeable_dict(), "template_id": choice.template.uid}
    if (source := getattr(choice.template, "src_hash", None)) is not None:
        entry["template_hash"] = source
    return entry


def _is_tuned() -> bool:
    return bool(config.max_autotune or config.max_autotune_gemm)
