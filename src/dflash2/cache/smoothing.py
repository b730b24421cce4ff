"""A causal Butterworth low-pass over demand, one sample a scheduler step (R-4.2)."""

from __future__ import annotations


class ButterworthLowPass:
    """Second-order sections designed by SciPy, run one sample at a time.

    A Butterworth filter has the flattest pass band of its order: slow changes of demand pass unchanged, bursts shorter
    than ``1 / cutoff`` steps are flattened. From order 2 on its answer overshoots a little; below zero, where blocks
    have no meaning, it is cut off.

    Args:
        order: 1 and up; each two add a section.
        cutoff: cycles per step, below 0.5, at which the amplitude is 1/√2.
    """

    def __init__(self, order: int, cutoff: float) -> None:
        from scipy.signal import butter, sosfilt_zi  # heavy to import, and only a server needs it

        design = butter(order, cutoff, fs=1.0, output="sos")
        self._sections: list[tuple[float, float, float, float, float]] = [
            (float(b0), float(b1), float(b2), float(a1), float(a2)) for b0, b1, b2, _, a1, a2 in design
        ]
        self._steady: list[tuple[float, float]] = [(float(z1), float(z2)) for z1, z2 in sosfilt_zi(design)]
        self._state: list[tuple[float, float]] = []
        self.reset(0.0)

    def reset(self, level: float) -> None:
        """Start as if the demand had been ``level`` for ever."""
        self._state = [(z1 * level, z2 * level) for z1, z2 in self._steady]

    def step(self, demand: float) -> float:
        """The smoothed demand after one more sample; never negative."""
        value = demand
        for index, (b0, b1, b2, a1, a2) in enumerate(self._sections):
            z1, z2 = self._state[index]
            out = b0 * value + z1
            self._state[index] = (b1 * value - a1 * out + z2, b2 * value - a2 * out)
            value = out
        return max(0.0, value)
