"""A probe of an engine whose speed is known, against a clock that is the engine's; and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulkrun.cli import main
from bulkrun.job.plan.forecast import forecast
from bulkrun.launch.runs.probe import _Trial
from bulkrun.request import Completion, EngineStats, PartialOutput, Request, SamplingParams

PROMPT_S, OUTPUT_S, SEATS = 0.001, 0.01, 4


class KnownSpeed:
    """Four requests at a time: a prompt in a step, then a token of each in a step, to the length that its seed says."""

    max_model_len, max_num_seqs = 1000, SEATS

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[Request] = []
        self._running: dict[str, tuple[Request, int]] = {}
        self._prompt_tokens = self._output_tokens = 0

    def add_request(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        while self._waiting and len(self._running) < SEATS:
            request = self._waiting.pop(0)
            self._running[request.request_id] = request, 0
            self._prompt_tokens += len(request.prompt_token_ids)
            self.now += PROMPT_S * len(request.prompt_token_ids)
        done = []
        for name, (request, tokens) in list(self._running.items()):
            self._output_tokens += 1
            self.now += OUTPUT_S
            self._running[name] = request, tokens + 1
            if tokens + 1 == request.seed:
                del self._running[name]
                done.append(Completion(name, (), "stop", num_output_tokens=tokens + 1))
        return done

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def abort(self, request_ids: object) -> None:
        raise AssertionError("nothing is taken back")

    def partial_outputs(self) -> list[PartialOutput]:
        return [PartialOutput(name, (0,) * tokens) for name, (_, tokens) in self._running.items()]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_prompt_tokens=self._prompt_tokens,
            num_output_tokens=self._output_tokens,
        )


def requests(number: int) -> list[Request]:
    params = SamplingParams(max_tokens=40)
    return [Request(str(n), [1] * (10 + n * 13 % 70), params, seed=1 + n * 7 % 30) for n in range(number)]


@pytest.mark.parametrize("seconds", [20.0, 1e6])
def test_a_job_takes_what_its_probe_says(seconds: float) -> None:
    engine, job = KnownSpeed(), requests(3000)
    trial = _Trial(engine, requests(400), seconds, clock=lambda: engine.now)
    prompt_tokens, output_tokens = sum(len(one.prompt_token_ids) for one in job), sum(one.seed for one in job)
    found = forecast(trial.slices, trial.outputs, prompt_tokens=prompt_tokens, generations=len(job))
    truth = PROMPT_S * prompt_tokens + OUTPUT_S * output_tokens
    assert found.seconds.likely == pytest.approx(truth, rel=0.1)
    assert found.seconds.low <= truth <= found.seconds.high
    assert found.output_tokens.likely == pytest.approx(output_tokens, rel=0.1)
    assert len(trial.outputs) < 400 if seconds == 20 else len(trial.outputs) == 400


def test_the_command_says_how_long_the_job_takes(tmp_path: Path) -> None:
    rows = [{"text": f"def f{n}(a):\n    return a + {n}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(
        f"{{name: a, model: 'bundled:tiny', input: {{path: {tmp_path}/rows.jsonl}}, prompt: {{column: text}}, "
        f"sampling: {{max_tokens: 6, temperature: 0, n: 2}}, output: {{path: {tmp_path}/out}}}}"
    )
    arguments = ["plan", str(tmp_path / "job.yaml"), "--probe", "1"]
    shown = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert shown.exit_code == 0 and "\ntime           about" in shown.stdout and "40 rows" in shown.stdout
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False).stdout)["probe"]
    assert found["rows"] == 40 and 0 < found["job"]["output_tokens"]["likely"] <= 2 * 40 * 6
    assert found["job"]["seconds"]["low"] < found["job"]["seconds"]["likely"] < found["job"]["seconds"]["high"]
    assert not (tmp_path / "out").exists()


def test_a_job_without_a_row_that_runs_has_no_probe(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "job.yaml").write_text(
        f"{{name: a, model: 'bundled:tiny', input: {{path: {tmp_path}/rows.jsonl}}, prompt: {{column: text, "
        f"chat_template: none}}, output: {{path: {tmp_path}/out}}}}"
    )
    shown = CliRunner().invoke(main, ["plan", str(tmp_path / "job.yaml"), "--probe", "1", "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["probe"] is None
    said = CliRunner().invoke(main, ["plan", str(tmp_path / "job.yaml"), "--probe", "1"]).stderr
    assert "probe: no row can run" in said
