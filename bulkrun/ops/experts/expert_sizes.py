"""What all experts of a mixture are of. Knows no product."""

from __future__ import annotations

from typing import NamedTuple


class ExpertSizes(NamedTuple):
    """Those of one expert's matrices."""

    hidden: int
    intermediate: int
    has_gates: bool = True  # beside its ups, in one matrix with them

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Outputs and inputs of both matrices."""
        num_ups = 2 * self.intermediate if self.has_gates else self.intermediate
        return [(num_ups, self.hidden), (self.hidden, self.intermediate)]
