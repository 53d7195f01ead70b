"""A report as one HTML file: no script, no other file, no network."""

import importlib.util
from pathlib import Path
from typing import Any

from fusedops.profiling.reasons import bytes_text, seconds_text
from fusedops.profiling.shares import BOUNDS
from fusedops.profiling.show.figure import COLORS
from fusedops.profiling.show.text import NAMES, saving_text

Profile = Any  # of report.py, which imports this file
__all__ = ["page"]

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fusedops.profile: {{ verdict }}</title>
<style>
:root { color-scheme: light dark; --line: #8885; --dim: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.dim, td.dim, li.dim { color: var(--dim); } ul { margin: .4rem 0; padding-left: 1.2rem; }
.stack { display: flex; height: 34px; border-radius: 4px; overflow: hidden; }
.stack span { min-width: 1px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); }
th.n, td.n { text-align: right; white-space: nowrap; }
td.name { word-break: break-word; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
.bar { height: .8em; border-radius: 2px; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="dim">{{ about }}</p>
<ul>{% for line in reasons %}<li>{{ line }}</li>{% endfor %}</ul>
{% if next %}<p>Without that, the rest would be limited by {{ next }}.</p>{% endif %}

<h2>Time: a step takes {{ step }}</h2>
<div class="stack" role="img" aria-label="shares of a step's time">
{% for s in shares %}<span style="width:{{ s.percent }}%;background:{{ s.color }}"
 title="{{ s.name }} {{ s.text }}"></span>{% endfor %}
</div>
<table>
<tr><th>bound</th><th class="n">share</th><th class="n">95 % interval</th></tr>
{% for s in shares %}<tr><td><span class="key" style="background:{{ s.color }}"></span>{{ s.name }}
</td><td class="n">{{ s.text }}</td><td class="n">{{ s.interval }}</td></tr>{% endfor %}
</table>
<p class="dim">{{ phases }}</p>

<h2>Memory</h2>
{% if memory %}<table>
{% for m in memory %}<tr><td>{{ m.name }}</td><td class="n">{{ m.text }}</td><td style="width:50%">
<div class="bar" style="width:{{ m.percent }}%;background:{{ color }}"></div></td></tr>{% endfor %}
</table>{% else %}<p class="dim">not checked</p>{% endif %}

{% if ops %}<h2>Operators</h2>
<table>
<tr><th>operator</th><th>module</th><th class="n">calls</th><th class="n">time</th>
<th class="n">share</th><th class="n">possible</th><th>mostly</th></tr>
{% for op in ops %}<tr><td class="name">{{ op.name }} {{ op.shapes }}</td><td>{{ op.module }}</td>
<td class="n">{{ op.calls }}</td><td class="n">{{ op.time }}</td><td class="n">{{ op.share }}</td>
<td class="n">{{ op.possible }}</td><td>{{ op.bound }}</td></tr>{% endfor %}
</table>{% endif %}

{% if advice %}<h2>Advice</h2>
<table>
<tr><th>advice</th><th>change</th><th>why</th><th>risk</th><th class="n">predicted</th>
<th class="n">measured</th></tr>
{% for a in advice %}<tr><td>{{ a.title }}</td><td><code>{{ a.how }}</code></td>
<td>{{ a.why }}</td><td>{{ a.risk }}</td><td class="n">{{ a.predicted }}</td>
<td class="n">{{ a.measured }}</td></tr>
{% endfor %}
</table>{% endif %}

<h2>Not checked</h2>
<ul>{% for line in not_checked %}<li class="dim">{{ line }}</li>{% endfor %}</ul>
</body>
</html>
"""
TOP = 25  # operators that are shown


def page(report: Profile, path: str | Path) -> None:
    """Writes the file. Raises ModuleNotFoundError without jinja2."""
    if importlib.util.find_spec("jinja2") is None:
        raise ModuleNotFoundError(
            "profile: html needs jinja2, which is missing: pip install 'fusedops[profile]'"
        )
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string(TEMPLATE)
    Path(path).write_text(template.render(_values(report)), encoding="utf-8")


def _values(report: Profile) -> dict[str, object]:
    verdict, time, machine = report.verdict, report.time, report.machine
    about = machine.about
    words = [str(about[k]) for k in ("model",) if k in about]
    words += [machine.device, f"{machine.threads} threads of {machine.cpus:g} CPUs"]
    words += [f"{time.steps} steps"]
    if time.tokens_per_s:
        words.append(f"{time.tokens_per_s:,.0f} tokens/s")
    phases = [f"{name} {seconds_text(s)}" for name, s in time.phases.items() if s]
    low, high = seconds_text(time.low), seconds_text(time.high)
    largest = max((report.memory or {"": 1}).values()) or 1
    return {
        "verdict": str(verdict),
        "title": _title(report),
        "about": ", ".join(words),
        "reasons": verdict.evidence,
        "next": _next(report),
        "step": f"{seconds_text(time.seconds)} ({low}..{high})",
        "shares": [_share(report, bound) for bound in BOUNDS if verdict.shares[bound][1] >= 0.005],
        "phases": "phases: " + ", ".join(phases),
        "memory": [
            {"name": name, "text": bytes_text(size), "percent": round(100 * size / largest, 1)}
            for name, size in (report.memory or {}).items()
        ],
        "color": COLORS["memory"],
        "ops": [
            {
                "name": op.name,
                "shapes": op.shapes,
                "module": op.module,
                "calls": op.calls,
                "time": seconds_text(op.seconds),
                "share": f"{op.share:.1%}",
                "possible": seconds_text(op.possible),
                "bound": op.bound,
            }
            for op in report.ops[:TOP]
        ],
        "advice": [
            {
                "title": one.title,
                "how": one.how,
                "why": one.why,
                "risk": one.risk,
                "predicted": saving_text(one.predicted) if one.predicted else "by measuring",
                "measured": saving_text(one.measured),
            }
            for one in report.advice
        ],
        "not_checked": verdict.not_checked,
    }


def _title(report: Profile) -> str:
    verdict = report.verdict
    if verdict.bounds == ("unknown",):
        return "No single bound was found"
    parts = [f"{NAMES[b]}, {verdict.shares[b][1]:.0%} of the step" for b in verdict.bounds]
    return "Limited by " + " and by ".join(parts)


def _next(report: Profile) -> str:
    verdict = report.verdict
    if verdict.bounds == ("unknown",):
        return ""
    return " and ".join(NAMES[bound] for bound in verdict.next_bounds)


def _share(report: Profile, bound: str) -> dict[str, object]:
    low, middle, high = report.verdict.shares[bound]
    return {
        "name": NAMES[bound],
        "percent": round(100 * middle, 2),
        "text": f"{middle:.1%}",
        "interval": f"{low:.1%}..{high:.1%}",
        "color": COLORS[bound],
    }
