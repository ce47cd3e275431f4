"""The first signal drains, the second ends the process at once; while starting, the first is enough."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bulkrun.launch.processes.signals import DRAIN_SIGNALS, drain_on_signal

SCRIPT = """
import sys, time
from bulkrun.errors import Interrupted
from bulkrun.launch.processes.signals import drain_on_signal
try:
    with drain_on_signal() as drain:
        if sys.argv[1] == "started":
            drain.started()
        print("ready", flush=True)
        while not drain.should_stop():
            time.sleep(0.01)
        print(drain.received, flush=True)
        if sys.argv[2] == "hang":
            time.sleep(60)
except Interrupted as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
sys.exit(75)
"""
# Says of each signal when it has been handled; not with print, which a signal may have interrupted.
ACKNOWLEDGING = """
import os
from bulkrun.launch.processes.signals import DrainOnSignal
handle = DrainOnSignal.handle
def acknowledge(drain, number, frame):
    handle(drain, number, frame)
    os.write(1, b"handled\\n")
DrainOnSignal.handle = acknowledge
"""


AGAIN = """
import sys, time
from bulkrun.errors import Interrupted
from bulkrun.launch.processes.signals import drain_on_signal
with drain_on_signal(supervised=True) as drain:
    drain.started()
    with drain.starting_again():
        pass
    try:
        if sys.argv[1] == "before":
            print("ready", flush=True)
            while not drain.should_stop():
                time.sleep(0.01)
        with drain.starting_again():
            print("ready", flush=True)
            time.sleep(60)
    except Interrupted as error:
        print(error, flush=True)
print(drain.received, flush=True)
"""


AT_EVERY_LINE = """
import os, signal, sys
from bulkrun.errors import Interrupted
from bulkrun.launch.processes.signals import DrainOnSignal, drain_on_signal
code = DrainOnSignal.starting_again.__wrapped__.__code__
lines = 0

def trace(frame, event, argument):
    global lines
    if frame.f_code is not code:
        return None
    if event == "line":
        lines += 1
        if lines == at:
            os.kill(os.getpid(), signal.SIGTERM)
    return trace

at = 1
while True:
    lines = 0
    with drain_on_signal(supervised=True) as drain:
        drain.started()
        sys.settrace(trace)
        try:
            with drain.starting_again():
                pass
        except Interrupted:
            assert drain.received == "SIGTERM"
        else:
            break
        finally:
            sys.settrace(None)
    at += 1
print(at, lines, drain.received)
"""


def start(phase: str, after: str = "end", *, script: str = SCRIPT) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", script, phase, after], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def check_that_two_change_as_much_as_one(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Of a process that acknowledges."""
    assert process.stdout is not None
    process.send_signal(number)
    assert [process.stdout.readline() for _ in range(2)] == ["handled\n", f"{number.name}\n"]
    process.send_signal(number)
    assert process.stdout.readline() == "handled\n"
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_each_drain_signal_asks_the_run_to_stop(number: signal.Signals) -> None:
    process = start("started")
    process.send_signal(number)
    assert process.communicate(timeout=20)[0] == f"{number.name}\n"
    assert process.returncode == 75


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_one_ends_the_process_at_once(number: signal.Signals, code: int) -> None:
    process = start("started", "hang")
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGUSR1\n"
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(20) == code
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("term", "shown"), [("xterm", "\x1b[?25h\r\n"), ("dumb", "\r\n")])
def test_the_second_one_gives_the_cursor_back_and_says_that_it_ended(term: str, shown: str) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "started", "hang"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": term},
    )
    os.close(theirs)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    said = os.read(ours, 9999).decode()
    os.close(ours)
    assert (
        said == f"{shown}stopped at once by SIGINT; what was saved is kept: run the same command again to continue\r\n"
    )


def test_a_second_one_after_the_saving_is_the_second_one_to_the_whole_command() -> None:
    script = """
import time
from bulkrun.launch.processes.signals import drain_on_signal
with drain_on_signal():
    with drain_on_signal() as drain:
        drain.started()
        print("ready", flush=True)
        while not drain.should_stop():
            time.sleep(0.01)
    print("saved", flush=True)
    time.sleep(60)
"""
    process = start("started", script=script)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130


def test_beside_the_main_thread_signals_are_left_to_their_owner() -> None:
    def handlers_while_it_runs() -> list[object]:
        with drain_on_signal() as drain:
            drain.started()
            return [signal.getsignal(number) for number in DRAIN_SIGNALS]

    before = [signal.getsignal(number) for number in DRAIN_SIGNALS]
    with ThreadPoolExecutor() as pool:
        assert pool.submit(handlers_while_it_runs).result() == before


def test_what_a_library_catches_while_starting_is_not_the_signal() -> None:
    script = SCRIPT.replace(
        "        while not drain.should_stop():\n            time.sleep(0.01)\n",
        "        try:\n            time.sleep(60)\n        except Exception:\n            sys.exit('torn file')\n",
    )
    assert "torn file" in script
    process = subprocess.Popen([sys.executable, "-c", script, "starting", "end"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "stopped by SIGTERM while starting; nothing was in flight\n"
    assert process.returncode == 75


def test_an_import_ends_before_the_signal_does_its_work(tmp_path: Path) -> None:
    """What is raised out of an extension's initialisation may abort the process: DuckDB's makes enums in Python."""
    (tmp_path / "slow_extension.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.3)\nprint('whole', flush=True)\n"
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + SCRIPT
    script = script.replace("        print(", "        import slow_extension; time.sleep(60)\n        print(", 1)
    ended = subprocess.run(
        [sys.executable, "-c", script, "starting", "end"], capture_output=True, text=True, timeout=50
    )
    assert ended.stdout == "whole\nstopped by SIGTERM while starting; nothing was in flight\n", ended.stderr
    assert ended.returncode == 75


COLLECTED = """
import os, signal, sys, time
from bulkrun.errors import Interrupted
from bulkrun.launch.processes.signals import drain_on_signal
class Collected:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_that_a_library_swallowed_ends_the_block_inside() -> None:
    script = (
        COLLECTED
        + """
try:
    with drain_on_signal():
        Collected()
        print("goes on", flush=True)
        with drain_on_signal():
            print("begins", flush=True)
except Interrupted as error:
    sys.exit(error.exit_code)
"""
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (ended.stdout, ended.returncode) == ("goes on\n", 75)


def test_one_that_was_held_back_is_told_once() -> None:
    script = (
        COLLECTED
        + """
try:
    with drain_on_signal():
        Collected()
        try:
            with drain_on_signal():
                print("begins", flush=True)
        except Interrupted as error:
            print(error, flush=True)
            time.sleep(0.2)
            sys.exit(error.exit_code)
except Interrupted as error:
    print(error, flush=True)
"""
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (ended.stdout, ended.returncode) == ("stopped by SIGTERM while starting; nothing was in flight\n", 75)


def test_a_signal_that_meets_a_callback_of_a_weak_reference_ends_the_block_after_it() -> None:
    script = """
import os, signal, sys, time, weakref
from bulkrun.errors import Interrupted
from bulkrun.launch.processes.signals import drain_on_signal
class Thing:
    def __hash__(self):
        return 1
class Noisy(dict):
    def __delitem__(self, key):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
things = weakref.WeakKeyDictionary()
things.data = Noisy()
try:
    with drain_on_signal():
        things[Thing()] = 1
        time.sleep(30)
        print("lost", flush=True)
except Interrupted as error:
    sys.exit(error.exit_code)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (ended.stdout, ended.returncode) == ("", 75)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_after_all_is_done_does_not_change_how_it_ended(number: signal.Signals) -> None:
    script = """
import time
from bulkrun.launch.processes.signals import drain_on_signal
with drain_on_signal() as drain:
    drain.end_with(3)
print("ready", flush=True)
time.sleep(60)
"""
    process = start("ended", script=script)
    process.send_signal(number)
    assert process.wait(20) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_saves_nothing_puts_its_things_away(number: signal.Signals, tmp_path: Path) -> None:
    script = f"""
import tempfile, time
from bulkrun.launch.processes.signals import end_on_signal
end_on_signal()
with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
    print("ready", flush=True)
    time.sleep(60)
"""
    process = start("started", script=script)
    process.send_signal(number)
    assert process.wait(20) in ({-number, 130} if number == signal.SIGINT else {128 + number})
    assert not list(tmp_path.iterdir())


def test_hearing_signals_needs_nothing_that_takes_time_to_import() -> None:
    slow = "{'click', 'numpy', 'pyarrow', 'pydantic'}"
    code = f"import sys, bulkrun.launch.processes.signals; print({slow} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_second_usr1_or_hangup_changes_nothing(number: signal.Signals) -> None:
    check_that_two_change_as_much_as_one(start("started", "hang", script=ACKNOWLEDGING + SCRIPT), number)


def test_under_nohup_a_hangup_is_no_matter() -> None:
    command = ["nohup", sys.executable, "-c", SCRIPT, "started", "end"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "SIGTERM\n", "of two that are heard the hangup comes first"


def test_under_nohup_a_command_that_saves_nothing_goes_on_too() -> None:
    script = """
import time
from bulkrun.launch.processes.signals import end_on_signal
end_on_signal()
print("ready", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143


def test_a_terminal_that_closed_does_not_end_the_saving() -> None:
    """As a terminal emulator does: the other end of the terminal goes, and the shell hands the hangup on."""
    ours, theirs = os.openpty()
    script = SCRIPT.replace(
        "        print(drain.received", "        print('x' * 10000, file=sys.stderr)\n        print(drain.received"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "started", "end"], stdout=subprocess.PIPE, stderr=theirs, text=True
    )
    os.close(theirs)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=20)[0] == "SIGHUP\n"
    assert process.returncode == 75


def test_while_starting_a_signal_ends_the_start() -> None:
    process = start("starting")
    process.send_signal(signal.SIGTERM)
    assert "while starting" in process.communicate(timeout=20)[0]
    assert process.returncode == 75


def test_a_supervised_process_hears_the_same_signal_twice_as_once() -> None:
    script = ACKNOWLEDGING + SCRIPT.replace("drain_on_signal()", "drain_on_signal(supervised=True)")
    check_that_two_change_as_much_as_one(start("started", "hang", script=script), signal.SIGTERM)


@pytest.mark.parametrize("phase", ["before", "while"])
def test_what_starts_again_within_the_loop_is_ended_like_the_start(phase: str) -> None:
    process = start(phase, script=AGAIN)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert said == "stopped by SIGTERM while starting; nothing was in flight\nSIGTERM\n" and process.returncode == 0


def test_a_signal_as_it_starts_again_or_has_just_started_is_not_lost() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_EVERY_LINE], capture_output=True, text=True, timeout=60)
    at, lines, received = ended.stdout.split()
    assert ended.returncode == 0 and int(at) == int(lines) + 1 > 5 and received == "None", "each line once"
