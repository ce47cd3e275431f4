"""What asks a run to stop: signals, of which the first one drains and a second one stops at once, and `bulkrun cancel`.

SIGINT (Ctrl-C), SIGTERM (Slurm, kill, shutdown), SIGHUP (a terminal that closed; ignored under nohup) and SIGUSR1
(Slurm's early warning) all mean: stop admitting, save, exit 75. A second SIGINT or SIGTERM ends the process on the spot
with 130 or 143, its children first: nothing that was journaled is lost by that, exactly as with kill -9. A supervised
worker hears every signal as the first one, because it may get the same from the system and from its supervisor, which
ends it when it must.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from bulkrun.errors import Interrupted

if TYPE_CHECKING:
    from bulkrun.job.store.cancel import CancelWatch

DRAIN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_END_AT_ONCE = (signal.SIGINT, signal.SIGTERM)  # the second time
_PATIENCE_S = 0.02  # until what does not let an exception through is tried again
_SHOW_CURSOR = "\x1b[?25h"


class _StoppedWhileStarting(BaseException):
    """Raised wherever the process is just then: no `except Exception` of a library may take it for its own defect."""


class DrainOnSignal:
    """Remembers that a signal asked the run to stop; `received` is its name or None.

    `before_ending` is called before a second signal ends the process; `cancel` is asked while nobody signalled.
    """

    def __init__(self, *, supervised: bool = False) -> None:
        self.received: str | None = None
        self.before_ending: Callable[[], None] = lambda: None
        self.cancel: CancelWatch | None = None
        self._supervised = supervised
        self._starting = True
        self._exit_code: int | None = None
        self._held_back: threading.Timer | None = None
        self._again = False

    def should_stop(self) -> bool:
        """Whether a signal has come or a cancel was heard; cheap enough to ask in every step."""
        return self.received is not None or (self.cancel is not None and self.cancel())

    def cancelled(self) -> bool:
        """Whether a cancel was requested by now: a worker may have heard it, and ended, before this process did."""
        return self.cancel is not None and self.cancel.now()

    def started(self) -> None:
        """From here on the run loop looks at `should_stop`; until here a signal ends the block with `Interrupted`."""
        self._starting = False
        if self.should_stop():
            raise Interrupted(f"stopped by {self.received or 'bulkrun cancel'} before the first row")

    @contextmanager
    def starting_again(self) -> Iterator[None]:
        """A block within the run loop that a signal ends with `Interrupted`, as it does until the start."""
        try:  # around all of it: the signal may come as the block begins, and as it ends
            try:
                self._starting = True
                self.refuse_to_begin()
                yield
            finally:
                self._starting = False
        except _StoppedWhileStarting as stop:
            raise Interrupted(str(stop)) from None

    def end_with(self, exit_code: int) -> None:
        """All is done: a signal that comes while Python puts its things away changes nothing, it only ends that."""
        self._exit_code = exit_code

    @property
    def has_ended(self) -> bool:
        """Whether all is done, and a signal only ends the process."""
        return self._exit_code is not None

    def refuse_to_begin(self) -> None:
        """Raise Interrupted where a signal was heard already: a library swallowed it, or it is held back."""
        if self.received:
            self._starting = False  # it is heard now: one that is held back would only be told once more
            raise Interrupted(self._while_starting())

    def hand_over(self, outer: object) -> None:
        """The next signal is `outer`'s; after one that was heard here it is the second to the whole command."""
        if self._held_back:
            self._held_back.cancel()
        if isinstance(outer, DrainOnSignal):
            outer.received = outer.received or self.received

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What the system calls when a signal comes."""
        if self._exit_code is not None:
            os._exit(self._exit_code)
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.received and not self._again:
            return self._handle_another(number)
        self._again = False
        self.received = signal.Signals(number).name
        if self._starting:
            self._end_start(number, frame)

    def _handle_another(self, number: int) -> None:
        if number in _END_AT_ONCE and not self._supervised:
            self.before_ending()
            _say_the_end(signal.Signals(number).name)
            os._exit(128 + number)

    def _end_start(self, number: int, frame: FrameType | None) -> None:
        """Raise; where an exception does not get through, a moment later."""
        if not (_is_importing(frame) or _is_finalizing(frame)):
            raise _StoppedWhileStarting(self._while_starting())
        self._held_back = threading.Timer(_PATIENCE_S, self._send_again, [number])
        self._held_back.daemon = True
        self._held_back.start()

    def _send_again(self, number: int) -> None:
        self._again = True
        os.kill(os.getpid(), number)

    def _while_starting(self) -> str:
        return f"stopped by {self.received} while starting; nothing was in flight"


@contextmanager
def drain_on_signal(*, supervised: bool = False) -> Iterator[DrainOnSignal]:
    """Handle the drain signals inside the block; the handlers of before come back at its end. Raises Interrupted.

    Outside the main thread there are no signals to handle: they are left to their owner.
    """
    drain = DrainOnSignal(supervised=supervised)
    if threading.current_thread() is not threading.main_thread():
        yield drain
        return
    heard = [number for number in DRAIN_SIGNALS if not _is_nohup(number)]
    outer = getattr(signal.getsignal(heard[0]), "__self__", None)
    if isinstance(outer, DrainOnSignal):
        outer.refuse_to_begin()
    before = {number: signal.signal(number, drain.handle) for number in heard}
    try:
        yield drain
    except _StoppedWhileStarting as stop:
        raise Interrupted(str(stop)) from None
    finally:
        for number, handler in before.items():
            drain.hand_over(getattr(handler, "__self__", None))
            if not drain.has_ended:
                signal.signal(number, handler)


def end_on_signal() -> None:
    """From here on, for a process that saves nothing: a signal ends it by an exception, so that it takes its temporary
    files along."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if not _is_nohup(number):
            signal.signal(number, _end_command)


def _end_command(number: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        os._exit(128 + number)  # nothing has begun, and C code that is being imported does worse with an exception
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    """C code that is being imported aborts at an exception, swallows or renames it."""
    return any(code.co_filename.startswith("<frozen importlib") for code in _codes(frame))


def _is_finalizing(frame: FrameType | None) -> bool:
    """Python only prints what a finalizer or a callback of a weak reference raises."""
    return any(code.co_name == "__del__" or code.co_filename == weakref.__file__ for code in _codes(frame))


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _is_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _say_the_end(name: str) -> None:
    """The last line of a process that ends in the middle of whatever it was writing; a live view hid the cursor."""
    drawn = os.isatty(2) and os.environ.get("TERM") not in (None, "dumb", "unknown")
    line = f"stopped at once by {name}; what was saved is kept: run the same command again to continue\n"
    with suppress(OSError):
        os.write(2, f"{_SHOW_CURSOR if drawn else ''}\n{line}".encode())


def _leave_terminal() -> None:
    """Drop output once the terminal has closed: writing to it would fail and must not interrupt the saving."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
