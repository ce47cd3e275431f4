"""What codes of four bits or fewer stand for, so that weights can be multiplied as they are stored. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BITS = 4
WHOLE_NUMBERS = tuple(float(code) for code in range(2**MAX_BITS))


@dataclass(frozen=True, slots=True)
class FourBitScheme:
    """(codebook[code] - zero point) * scale, both of a group of inputs."""

    codebook: tuple[float, ...]  # sixteen numbers
    group_size: int | None  # inputs; None: all of a weight
    has_zeros: bool
    are_powers: bool = False  # scales, of two: a bfloat16 holds them

    def num_groups(self, num_inputs: int) -> int:
        """Of a weight with so many inputs; the last one may have fewer."""
        return -(-num_inputs // self.size_of_group(num_inputs))

    def size_of_group(self, num_inputs: int) -> int:
        """Of a weight with so many inputs."""
        return self.group_size or num_inputs
