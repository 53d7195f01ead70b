"""The table of patch's report folds repeated layers into one row, and nothing else."""

from axes import grid

from fusedops.patching import PatchReport, Site


def paths(*names):
    report = PatchReport(fused=[Site(name, "norm", "LayerNorm", "layer_norm") for name in names])
    return [line.split()[1] for line in str(report).splitlines()[3:]]


@grid(
    "names,rows",
    [
        (["norm"], ["norm"]),
        ([f"layers.{i}.norm" for i in range(12)], ["layers.0-11.norm"]),
        ([f"h.{i}" for i in (0, 1, 2, 5, 7)], ["h.0-2,5,7"]),
        (["h.0.ln_1", "h.0.ln_2"], ["h.0.ln_1", "h.0.ln_2"]),
        ([f"s.{i}.b.{j}.n" for i in range(2) for j in range(3)], ["s.0-1.b.0-2.n"]),
        (["s.0.b.0.n", "s.0.b.1.n", "s.1.b.0.n"], ["s.0.b.0-1.n", "s.1.b.0.n"]),
        (["a.0.n", "a.0.n", "a.1.n"], ["a.0-1.n"]),
    ],
)
def test_folding(names, rows):
    assert paths(*names) == rows


def test_sites_with_different_outcomes_do_not_fold():
    report = PatchReport(
        fused=[Site("h.0.n", "norm", "LayerNorm", "layer_norm")],
        skipped=[Site("h.1.n", "norm", "LayerNorm", reason="it has buffers")],
        notes=["loss: not in this version"],
    )
    head, *_, fused, skipped, note = str(report).splitlines()
    assert head == report.summary and head.endswith("norm: 1 of 2 fused")
    assert fused.split() == ["norm", "h.0.n", "LayerNorm", "layer_norm"]
    assert skipped.endswith("skipped: it has buffers")
    assert note == "loss: not in this version"


def test_empty():
    assert "no site found" in str(PatchReport())
