"""The HTML template of a profile report, with its CSS inside and without scripts."""

__all__ = ["TEMPLATE"]

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --dim: #59636e; --line: #d1d9e0;
  --soft: #f3f5f7; --mark: #1b1f24; --memory: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --back: #11151a; --text: #e6eaef; --dim: #9aa5b1; --line: #353d47; --soft: #1b2129;
    --mark: #fff; --memory: #56b4e9; } }
* { box-sizing: border-box; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem;
  background: var(--back); color: var(--text); print-color-adjust: exact;
  -webkit-print-color-adjust: exact; overflow-wrap: break-word; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: .2rem 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0; }
p { margin: .4rem 0; } ul, ol { margin: .4rem 0; padding-left: 1.3rem; } li { margin: .2rem 0; }
.dim, caption { color: var(--dim); font-size: .875rem; }
caption { text-align: left; padding-bottom: .3rem; }
code { font: .875em/1.4 ui-monospace, monospace; background: var(--soft); border-radius: 4px;
  padding: .1em .35em; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem;
  margin: 1.2rem 0 0; }
.facts div { background: var(--soft); border-radius: 6px; padding: .6rem .8rem; }
.facts dt { color: var(--dim); font-size: .875rem; }
.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
.facts small { display: block; color: var(--dim); font-weight: 400; font-size: .8125rem; }
.stack { display: flex; gap: 2px; height: 2.25rem; margin: .6rem 0 1rem; }
.stack span { min-width: 3px; border-radius: 3px; overflow: hidden; text-align: center;
  font-size: .875rem; line-height: 2.25rem; white-space: nowrap; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: baseline; padding: .3rem .75rem .3rem 0;
  border-bottom: 1px solid var(--line); font-weight: 400; }
thead th { color: var(--dim); font-size: .875rem; vertical-align: bottom; }
th.n, td.n { text-align: right; white-space: nowrap; } tr > :last-child { padding-right: 0; }
td.plot { width: 40%; min-width: 6rem; } tr.named th { font-weight: 600; }
td.name { min-width: 13rem; overflow-wrap: anywhere; }
.key { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .5em; }
.track { position: relative; height: .8rem; background: var(--soft); }
.track i { position: absolute; top: 0; bottom: 0; }
.track .whisker { top: 46%; bottom: 46%; background: var(--mark); }
.track .limit { width: 2px; top: -3px; bottom: -3px; background: var(--mark); }
.wide { overflow-x: auto; } .wide table { min-width: 40rem; }
.advice { list-style: none; padding: 0; }
.advice > li { border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem;
  margin: .6rem 0; break-inside: avoid; }
.advice .head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: .2rem 1.5rem; }
.advice .gain { font-variant-numeric: tabular-nums; } .advice b { font-weight: 600; }
@media (max-width: 36rem) { h1 { font-size: 1.4rem; } .facts { grid-template-columns: 1fr 1fr; }
  .facts dd { font-size: 1.05rem; } td.plot { width: 22%; min-width: 3rem; }
  th, td { padding-right: .5rem; } .limits, .limited { display: none; } }
@media print { :root { color-scheme: light; --back: #fff; --text: #000; --dim: #444; --line: #bbb;
    --soft: #f3f5f7; --mark: #000; --memory: #0072b2; }
  html { font-size: 11px; } section { break-inside: avoid; } .long { break-inside: auto; }
  body { line-height: 1.35; max-width: none; padding: 0; margin: 0; }
  tr, .advice > li { break-inside: avoid; } h2, caption { break-after: avoid; }
  h2 { margin-top: 1rem; } .wide { overflow: visible; } .wide table { min-width: 0; } }
"""

TEMPLATE = (
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} · fusedops.profile</title>
<style>"""
    + STYLE
    + """</style>
</head>
<body>
<header>
<p class="dim">fusedops.profile of {{ model }}</p>
<h1>{{ title }}</h1>
{% if next %}<p>Without that time, {{ next }} would limit the rest.</p>{% endif %}
<dl class="facts">
{% for name, value, remark in facts %}<div><dt>{{ name }}</dt>
<dd>{{ value }}<small>{{ remark }}</small></dd></div>
{% endfor %}</dl>
</header>
<main>
{% if verdict.evidence %}<section><h2>Why</h2>
<ul>{% for line in verdict.evidence %}<li>{{ line }}</li>
{% endfor %}</ul></section>{% endif %}

{% if report.advice %}<section class="long"><h2>Advice</h2>
<p class="dim">What a step would lose; the largest gain comes first. A plus sign is a loss.</p>
<ol class="advice">
{% for a in report.advice %}<li><div class="head"><h3>{{ loop.index }}. {{ a.title }}</h3>
<span class="gain">{% if a.measured %}<b>measured {{ a.measured|saving }}</b>,
{% endif %}{% if a.predicted %}predicted {% endif %}{{ a|predicted }}</span></div>
<p>{{ a.why }}</p>
<p><code>{{ a.how }}</code></p>
<p class="dim">{% if a.risk %}Risk: {{ a.risk }}. {% endif %}{% if a.formula -%}
Prediction: {{ a.formula }}.{% endif %}</p></li>
{% endfor %}</ol></section>{% endif %}

<section><h2>Time: a step takes {{ report.time.seconds|seconds }}</h2>
<div class="stack" role="img" aria-label="shares of a step's time: {{ stack }}">
{% for bound in bounds %}{% set low, middle, high = verdict.shares[bound] -%}
<span style="width:{{ (100 * middle)|round(2) }}%;background:{{ COLORS[bound] }};
color:{{ ink(COLORS[bound]) }}"
 title="{{ NAMES[bound] }}: {{ middle|share }}">{% if middle >= 0.08 %}{{ middle|share }}{% endif %}
</span>
{% endfor %}</div>
<table><caption>What the step's time goes to. The thin line is the 95 % interval, the tick is the
share from which a bound is named.</caption>
<thead><tr><th scope="col">bound</th><th scope="col" class="plot"></th>
<th scope="col" class="n">share</th>
<th scope="col" class="n">95 % interval</th><th scope="col" class="n limits">named from</th></tr>
</thead>
<tbody>{% for bound in bounds %}{% set low, middle, high = verdict.shares[bound] -%}
{% set limit = THRESHOLDS.get(bound) -%}
<tr{% if bound in verdict.bounds %} class="named"{% endif %}>
<th scope="row">
<span class="key" style="background:{{ COLORS[bound] }}"></span>{{ NAMES[bound] }}</th>
<td class="plot"><div class="track">
<i style="width:{{ (100 * middle)|round(2) }}%;background:{{ COLORS[bound] }}"></i>
<i class="whisker"
 style="left:{{ (100 * low)|round(2) }}%;width:{{ (100 * (high - low))|round(2) }}%"></i>
{% if limit %}<i class="limit" style="left:{{ (100 * limit)|round(2) }}%"></i>{% endif %}</div></td>
<td class="n">{{ middle|share }}</td>
<td class="n">{{ "%.0f..%.0f %%"|format(100 * low, 100 * high) }}</td>
<td class="n limited">{% if limit %}{{ limit|share }}{% endif %}</td></tr>
{% endfor %}</tbody></table>
<p>Phases: {{ phases }}.</p>
{% if report.time.inflation is not none %}<p class="dim">torch.profiler made the step
{{ "%.2f"|format(report.time.inflation) }} times as long; no time here contains that.</p>{% endif %}
</section>

<section><h2>Memory{% if sizes %}: {{ report.memory.peak|size }} at the peak{% endif %}</h2>
{% if sizes %}<table><caption>The most that a category holds at any time of the step. Categories
can be largest at different times, so they need not add up to the peak.</caption>
<thead><tr><th scope="col">category</th><th scope="col" class="plot"></th>
<th scope="col" class="n">MiB</th></tr></thead>
<tbody>{% for name, bytes in sizes.items() %}<tr{% if loop.first %} class="named"{% endif %}>
<th scope="row">{{ name }}</th><td class="plot"><div class="track">
<i style="width:{{ (100 * bytes / report.memory.peak)|round(1) }}%;background:var(--memory)"></i>
</div></td><td class="n">{{ bytes|mebibytes }}</td></tr>
{% endfor %}</tbody></table>
{% if report.memory.slack %}<p class="dim">The process holds {{ report.memory.slack|size }} more:
the interpreter, libraries, memory that was freed and kept, and tensors that the step does not
use.</p>{% endif %}
{% else %}<p class="dim">not checked</p>{% endif %}</section>

{% if modules %}<section><h2>Modules</h2>
<table><caption>Time in a module's own operators, forward and backward, without submodules. A star
stands for all layers.</caption>
<thead><tr><th scope="col">module</th><th scope="col" class="n">{{ unit }}</th>
<th scope="col" class="n">share</th></tr></thead>
<tbody>{% for row, time in modules %}<tr><td class="name">{{ row.name or OUTSIDE }}</td>
<td class="n">{{ time }}</td><td class="n">{{ row.share|share }}</td></tr>
{% endfor %}</tbody></table></section>{% endif %}

{% if ops %}<section class="long"><h2>Operators</h2>
<div class="wide" role="region" aria-label="operators" tabindex="0">
<table><caption>Possible is the time at this machine's measured peak and bandwidth.</caption>
<thead><tr><th scope="col">operator</th><th scope="col">module</th>
<th scope="col" class="n">calls</th>
<th scope="col" class="n">{{ op_unit }}</th><th scope="col" class="n">share</th>
<th scope="col" class="n">possible</th><th scope="col">mostly</th></tr></thead>
<tbody>{% for op, time, possible in ops %}<tr>
<td class="name"><b>{{ op.name }}</b> {{ op.shapes }}</td>
<td class="name">{{ op.module or OUTSIDE }}</td><td class="n">{{ "{:,}".format(op.calls) }}</td>
<td class="n">{{ time }}</td><td class="n">{{ "%.1f %%"|format(100 * op.share) }}</td>
<td class="n">{{ possible }}</td><td>{{ NAMES[op.bound] }}</td></tr>
{% endfor %}</tbody></table></div></section>{% endif %}

<section><h2>Machine</h2>
<p>{{ machine }}</p>
{% if ceilings %}<p class="dim">{{ ceilings }}</p>{% endif %}</section>

{% if verdict.not_checked %}<section><h2>Not checked</h2>
<ul class="dim">{% for line in verdict.not_checked %}<li>{{ line }}</li>
{% endfor %}</ul></section>{% endif %}
</main>
</body>
</html>
"""
)
