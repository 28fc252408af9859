"""The page of a plan: what it holds, and what it says under the pointer."""

import collections
import dataclasses
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.report import facts, page
from tests.report.plans import CASES, are_recomputed, plan_of

# As much of a browser as the page asks for. A pixel is narrower than any run of an op.
WIDTH = 10_000_096
BROWSER = """
const elements = {};
const drawn = new Proxy({}, {get: (target, name) => name in target ? target[name] : () => {}});
globalThis.document = {getElementById: id => elements[id] ??= {
  style: {}, textContent: "", clientWidth: %d, clientHeight: 400, getContext: () => drawn}};
globalThis.window = {};
document.getElementById("data").textContent = require("fs").readFileSync(0, "utf8");
"""
LEFT, RIGHT = 72, 24  # of the curves lie the labels

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")


def parts(plan, folder):
    """The data and the script of the page."""
    plan.save_timeline(folder / "timeline.html")
    html = (folder / "timeline.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', html)
    # A module, for its names are its own: a `const top` beside the browser's stops a plain script.
    (script,) = re.findall(r'<script type="module">(.*)</script>', html, re.DOTALL)
    return data, script


def under_the_pointer(plan, folder, *commands):
    """What the page says of the plan and of the plain step after each of some commands."""
    data, script = parts(plan, folder)
    tell = "said.push([elements.plan.textContent, elements.plain.textContent]);\n"
    told = "const said = [];\n" + "".join(f"{command};\n{tell}" for command in commands)
    program = folder / "page.js"
    program.write_text(f"{BROWSER % WIDTH}\n{script}\n{told}console.log(JSON.stringify(said));")
    ran = subprocess.run(["node", program], input=data, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", CASES)
def test_the_data_of_the_page(name, tmp_path):
    plan = plan_of(name)
    data = json.loads(parts(plan, tmp_path)[0])
    planned, plain = data["courses"]
    assert max(planned["alive"]) == planned["peak"] == plan.peak_bytes
    assert max(plain["alive"]) == plain["peak"] == plan.baseline_peak_bytes
    again = [data["ops"][i]["name"] for i in pairs(planned, "recomputed")]
    assert are_recomputed(plan, again)
    assert not [*pairs(plain, "recomputed")]
    assert planned["begins"][-1] / plain["begins"][-1] == pytest.approx(1 + plan.overhead, rel=1e-3)
    assert data["budget"] == plan.budget_bytes


def pairs(course, row):
    return (run for run, what in zip(course["runs"], course["rows"], strict=True) if what == row)


@pytest.mark.parametrize("name", CASES)
def test_the_lives_of_tensors_add_up_to_the_peak(name):
    plan = plan_of(name)
    data = page.timeline_data(plan)
    course = data["courses"][0]
    run = int(np.argmax(course["alive"]))
    made, last = (np.array(course["copies"][end]) for end in ("made", "last"))
    alive = np.flatnonzero((made <= run) & (run <= last))
    sizes = np.array(data["tensors"])[np.array(course["copies"]["tensor"])[alive]]
    scratch = data["ops"][course["runs"][run]]["scratch"]
    assert sizes.sum() + scratch == sum(part.bytes for part in facts.at_peak(plan).held)


def test_it_fetches_nothing_and_no_name_ends_its_data(tmp_path):
    plan = plan_of("resnet20")
    named = dataclasses.replace(
        plan.problem.ops[0], name="</script><script src='https://elsewhere.example'>"
    )
    ops = (named, *plan.problem.ops[1:])
    changed = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, ops=ops))
    assert json.loads(parts(changed, tmp_path)[0])["ops"][0]["name"] == named.name
    html = (tmp_path / "timeline.html").read_text(encoding="utf-8")
    assert not re.search(r"<script[^>]* src=|<link|<img|@import|url\(", html)
    assert "default-src 'none'" in html


@needs_node
@pytest.mark.parametrize("name", CASES)
def test_at_first_it_shows_the_peak(name, tmp_path):
    plan = plan_of(name)
    ((planned, _),) = under_the_pointer(plan, tmp_path, "")
    peak, moment = format_bytes(plan.peak_bytes), facts.at_peak(plan)
    assert f"alive  {peak} of {peak} at the peak" in planned
    assert moment.op in planned
    largest, *_ = planned.split("held by\n")[1].splitlines()
    sums = collections.Counter()
    for part in moment.held:
        name = "scratch space" if part.kind == facts.SCRATCH else part.origin
        sums[name, part.kind == facts.RECOMPUTED] += part.bytes
    (layer, again), size = sums.most_common(1)[0]
    assert largest.strip() == f"{format_bytes(size)}  {layer}{', run again' if again else ''}"


@needs_node
def test_the_op_under_the_pointer(tmp_path):
    plan = plan_of("resnet20")
    data = json.loads(parts(plan, tmp_path)[0])
    planned, plain = data["courses"]
    begins = np.array(planned["begins"])
    again = np.array(planned["rows"]) == "recomputed"
    run = int(np.argmax(np.diff(begins) * again))
    time = begins[run : run + 2].mean()
    end = max(begins[-1], plain["begins"][-1])
    place = LEFT + time / end * (WIDTH - LEFT - RIGHT)
    move = f"elements.chart.onpointermove({{buttons: 0, offsetX: {place}}})"
    wheel = f"elements.chart.onwheel({{offsetX: {place}, deltaY: -900, preventDefault() {{}}}})"
    away = f"elements.chart.onpointermove({{buttons: 0, offsetX: {WIDTH - RIGHT}}})"
    here, closer, at_the_end = under_the_pointer(
        plan, tmp_path, move, f"{wheel}; {move}", f"elements.chart.ondblclick(); {away}"
    )
    op = data["ops"][planned["runs"][run]]
    assert "run again" in here[0].splitlines()[0]
    assert f"op     {op['name']} ({op['type']})" in here[0]
    assert f"layer  {op['layer']}" in here[0]
    assert f"makes  {format_bytes(op['bytes'])}" in here[0]
    assert f"alive  {format_bytes(planned['alive'][run])}" in here[0]
    assert closer == here  # the wheel keeps what is under the pointer
    beside = data["ops"][plain["runs"][np.searchsorted(plain["begins"], time, "right") - 1]]
    assert f"op     {beside['name']} " in here[1]
    assert at_the_end == [f"{planned['name']}: done", "plain: done"]
