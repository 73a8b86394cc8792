"""How many requests are in flight, and whether one more may come in."""

from kvbus_protocols.errors import ApiError


class Admission:
    """Counts requests. While draining none comes in."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_flight = 0
        self.draining = False

    def refusal(self) -> ApiError | None:
        """Why no request may come in now; None: one may."""
        if self.draining:
            return ApiError(503, "The server is shutting down.", code="draining")
        if self.in_flight >= self._limit:
            return ApiError(503, f"The server is busy: {self._limit} requests are in flight.", code="overloaded")
        return None

    def enter(self) -> None:
        """Raise ApiError when `refusal` has a reason."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
