"""Whose run an `s3://` prefix belongs to: the gate through which results get into a bucket.

`_bulkrun.json`, put there only if absent before anything runs, names the run and where its state is. A prefix with
objects and without it is somebody's, and a prefix that names another run is that run's, all that is below it too:
nothing is put into either. Where somebody deleted the file of a run that goes on, it is put again beside its results.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bulkrun.data.storage.durable import read_json
from bulkrun.errors import ResumeError, RunError, UsageError
from bulkrun.job.store.events import utc_now
from bulkrun.job.store.object_store import ObjectPrefix
from bulkrun.job.store.run_dir import RunDir

OWNER = "_bulkrun.json"
SUCCESS = "_SUCCESS"


def name_of(run: RunDir, part: Path) -> str:
    """The name of a part's object: its place in the run's directory."""
    return part.relative_to(run.root).as_posix()


def refuse_used_prefix(prefix: ObjectPrefix, ours: Collection[str] = ()) -> None:
    """Raise UsageError when a run would mix with unknown objects, or lie in another run's prefix or around it,
    ResumeError when the prefix is another run's. `ours`: the names that the run gave to its objects."""
    names = sorted(prefix.list().keys() - set(ours))
    if OWNER in names:
        raise ResumeError(_taken(prefix))
    inside = next((name for name in names if name.endswith(f"/{OWNER}")), None)
    around = next((parent for parent in prefix.parents() if parent.has(OWNER)), None)
    if inside or around:
        other = around.url if around else f"{prefix.url}/{(inside or '').removesuffix(f'/{OWNER}')}"
        where = (
            f"lies in the results of another run ({other})" if around else f"has another run's results in it ({other})"
        )
        raise UsageError(f"{prefix.url}: {where}; choose an output.path beside that one")
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        mend = "move them away, then run it again" if ours else "choose an empty or new prefix as output.path"
        raise UsageError(f"{prefix.url}: holds objects that do not belong to a run ({shown}) and no {OWNER}; {mend}")


def refuse_fresh(prefix: ObjectPrefix) -> None:
    """Raise ResumeError when a run that starts anew would meet the objects of the old one."""
    if prefix.list():
        raise ResumeError(
            f"{prefix.url}: --fresh moves directories aside, not objects: choose another output.path, or move what is "
            "below this prefix away yourself"
        )


def own_prefix(prefix: ObjectPrefix, run_id: str, run: RunDir) -> None:
    """Make the prefix this run's, or see that it is and names the place where the run is now.

    Raises ResumeError when it is another run's, RunError when the store takes no conditional puts, each time.
    """
    if OWNER not in prefix.list():
        refuse_used_prefix(prefix, _own_names(run))
        prefix.put_new_json(OWNER, {"run_id": run_id, **_place(run), "created": utc_now()})
    owner = prefix.read_json(OWNER)
    if owner.get("run_id") != run_id:
        raise ResumeError(_taken(prefix))
    _refuse_unconditional(prefix, owner)
    if owner.get("state") != _place(run)["state"]:
        prefix.put_json(OWNER, {**owner, **_place(run)})


def _own_names(run: RunDir) -> set[str]:
    """The names that may be in the bucket by this run's hand; whether an object is ours is seen when results come."""
    names, ledger = {name_of(run, path) for path in run.parts().values()}, read_json(run.delivered)
    return names if ledger is None else {SUCCESS, *names, *ledger["parts"]}


def _place(run: RunDir) -> dict[str, Any]:
    return {"state": str(run.root.resolve()), "host": socket.gethostname()}


def _refuse_unconditional(prefix: ObjectPrefix, owner: dict[str, Any]) -> None:
    """Raise RunError where a put goes over the owner that is there: such a store would lose a part to another one."""
    if prefix.put_new_json(OWNER, {**owner, "probe": secrets.token_hex(8)}):
        raise RunError(
            f"{prefix.url}: this store does not support `If-None-Match: *`, which writing results needs; "
            "use one that does, or a local output.path"
        )


def _taken(prefix: ObjectPrefix) -> str:
    owner = prefix.read_json(OWNER)
    return (
        f"{prefix.url}: holds the results of another run ({owner.get('run_id')}), whose state is in "
        f"{owner.get('state')} on {owner.get('host')}; continue it with output.state set to that directory, or choose "
        "another output.path"
    )
