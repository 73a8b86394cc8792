"""When a tier that has trouble is bypassed, and when it is tried again."""


class Breaker:
    """Closed: the tier is used. Open: it is not, for ``rest_s``, twice as long after each trial that failed. Then one trial at a
    time; a trial of which nobody ever reports how it ended makes room for the next after ``trial_s``.

    ``failures``: so many in a row open it. Times are of one monotonic clock.
    """

    def __init__(self, *, failures: int, rest_s: float, trial_s: float, longest_rest_s: float = 60.0) -> None:
        self._failures = failures
        self._first_rest_s = rest_s
        self._longest_rest_s = max(rest_s, longest_rest_s)
        self._trial_s = trial_s
        self._rest_s = rest_s
        self._in_a_row = 0
        self._open_until_s: float | None = None
        self._trial_until_s: float | None = None
        self.opened = 0

    @property
    def is_closed(self) -> bool:
        return self._open_until_s is None

    def can_pass(self, now_s: float) -> bool:
        """Would `passes` say yes? Changes nothing."""
        if self._open_until_s is None:
            return True
        if now_s < self._open_until_s:
            return False
        return self._trial_until_s is None or now_s >= self._trial_until_s

    def passes(self, now_s: float) -> bool:
        """May the tier be used now? Yes while it is open means: this use is the trial."""
        if not self.can_pass(now_s):
            return False
        if self._open_until_s is not None:
            self._trial_until_s = now_s + self._trial_s
        return True

    def succeeded(self) -> None:
        """A use ended well and in time. While it rests that says nothing: the use began before the trouble."""
        if self._open_until_s is not None and self._trial_until_s is None:
            return
        self._in_a_row = 0
        self._open_until_s = self._trial_until_s = None
        self._rest_s = self._first_rest_s

    def failed(self, now_s: float, *, at_once: bool = False) -> None:
        """``at_once``: one is enough, because each costs a whole deadline."""
        if self._open_until_s is not None:
            if self._trial_until_s is not None:
                self._rest_s = min(2 * self._rest_s, self._longest_rest_s)
                self._open(now_s)
            return
        self._in_a_row += 1
        if at_once or self._in_a_row >= self._failures:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._open_until_s = now_s + self._rest_s
        self._trial_until_s = None
        self.opened += 1
