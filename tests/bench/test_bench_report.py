"""The report: figures beside the paper's with the difference, the same from the same rows, plots inside."""

from __future__ import annotations

import re
import sys

import pytest

from neuralmean.bench import gaps, plots, report
from neuralmean.bench.experiments import paper
from neuralmean.bench.results import make_row, write_rows
from neuralmean.errors import ArtefactError, InputError, MissingExtraError


def row(experiment, model, ood, method, auroc, *, inside="cifar10", protocol="full-access", **extra):
    columns = {
        "experiment": experiment,
        "model": model,
        "id": inside,
        "ood": ood,
        "method": method,
        "protocol": protocol,
        "auroc": auroc,
        "tnr95": 60.0,
        "accuracy": 80.0,
        "n_id": 5000,
        "n_ood": 4000,
        "seed": 0,
        "seconds": 1.0,
    }
    return make_row(columns, weights=f"{model}-{inside}.safetensors", n_fit_id=100, n_fit_ood=50, **extra)


def timed(method, latency_ms, auroc):
    extra = {
        "fit_seconds": 12.0,
        "latency_ms": latency_ms,
        "plain_ms": 10.0,
        "ratio": latency_ms / 10,
        "passes_per_image": 1.0,
        "peak_mb": 30.0,
        "threads": 2,
        "machine": "x86_64, torch 2.13.0",
        "repeats": 200,
    }
    return row("latency", "resnet56", "cifar100", method, auroc, **extra)


def scatter(experiment, size, kind, seed=0):
    scores = {"id_scores": [0.1, 0.2], "ood_scores": [0.5, 0.6]}
    base = row(experiment, "resnet56", "svhn", "ours-avg", 99.5, setting=f"batch {size}", batch_size=size, kind=kind)
    return {**base, **scores, "seed": seed}


ROWS = [
    row("transfer", "densenet100", "svhn", "ours-lr", 97.3, auroc_ci=[96.8, 97.7]),
    row("zero-shot", "resnet56", "svhn", "ours-mlp", 60.6),
    row("zero-shot", "resnet56", "cifar100", "ours-mlp", 70.2),
    row("zero-shot", "resnet56", "svhn", "energy", 91.0),
    row("few-shot", "resnet56", "svhn", "ours-lr", 99.8, auroc_std=0.25),
    timed("msp", 10.1, 87.0),
    timed("ours-mlp", 11.5, 92.0),
    row("layers", "resnet56", "svhn", "ours-lr", 90.0, setting="first 1 layers", layers=1),
    row(
        "layers",
        "resnet56",
        "svhn",
        "ours-lr",
        99.0,
        setting="first 2 layers",
        layers=2,
        importance={"a": 0.1, "b": 0.2},
    ),
    scatter("batch-size", 1, "trained"),
    scatter("batch-size", 4, "trained"),
    scatter("untrained", 8, "buffers as born", seed=1),
    scatter("untrained", 8, "buffers as born", seed=0),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "rows.json"
    write_rows(path, ROWS)
    return path


@pytest.fixture(scope="module")
def markdown(results):
    report.write(results, markdown=results.parent / "results.md")
    return (results.parent / "results.md").read_text()


def line_with(text, *parts):
    (line,) = [line for line in text.splitlines() if line.startswith("|") and all(part in line for part in parts)]
    return line


def test_the_papers_figure_stands_beside_ours_with_the_difference(markdown):
    line = line_with(markdown, "SVHN", "97.3 [96.8, 97.7]")
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "SVHN",
        "Ours-LR",
        "97.3 [96.8, 97.7]",
        "99.2",
        "\u22121.9",
        "60.0",
        "95.8",
        "\u221235.8",
        "80.0",
        "95.4",
        "\u221215.4",
        "5,000 / 4,000",
        "100 / 50",
    ]


def test_a_stand_in_is_marked(markdown):
    assert "| 60.6 | 99.6† | \u221239.0† |" in line_with(markdown, "SVHN", "Ours-MLP", "60.6 | 99.6")
    assert "†: the paper's figure is for ResNet-34" in markdown


def test_what_the_paper_does_not_print_is_a_dash(markdown):
    assert "| 99.8 ± 0.2 | \u2013 | \u2013 |" in line_with(markdown, "99.8 ±")


def test_the_overview_has_methods_by_sets_and_their_mean(markdown):
    assert "| Ours-MLP | 60.6 | 70.2 | 65.4 |" in markdown
    assert "| Energy | 91.0 | \u2013 | 91.0 |" in markdown


def test_latency_has_the_papers_ratio_beside_ours(markdown):
    assert "| Plain pass | \u2013 | \u2013 | \u2013 | 10.0 | 6.7 | 1.00 | 1.00 | 1 | \u2013 |" in markdown
    assert "| Ours-MLP | 92.0 | 12.0 | 94.0 | 11.5 | 7.5 | 1.15 | 1.12 | 1.0 | 30 |" in markdown


def test_sections_are_in_the_order_of_the_paper_with_their_reference_and_remark(markdown):
    names = re.findall(r"^## ([a-z-]+):", markdown, re.MULTILINE)
    assert names == ["zero-shot", "few-shot", "transfer", "latency", "layers", "batch-size", "untrained"]
    assert "The paper's Figure 5, Table 6." in markdown
    assert "zero-shot figures could not be reproduced with its recipe" in markdown


def test_it_says_which_weights_and_sets(markdown):
    assert "densenet100-cifar10.safetensors, resnet56-cifar10.safetensors" in markdown


def test_every_plot_that_the_page_names_is_there(markdown, results):
    links = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", markdown)
    assert "results-plots/batch-size-svhn-trained.svg" in links
    assert "results-plots/latency.svg" in links
    assert all((results.parent / link).read_text().startswith("<svg") for link in links)


def test_the_same_rows_give_the_same_files(results, tmp_path):
    first = [path.read_bytes() for path in report.write(results, markdown=tmp_path / "a.md", html=tmp_path / "a.html")]
    again = [path.read_bytes() for path in report.write(results, markdown=tmp_path / "a.md", html=tmp_path / "a.html")]
    assert first == again


def test_html_is_one_file_with_tables_and_plots_inside(results, tmp_path):
    (path,) = report.write(results, html=tmp_path / "report.html")
    text = path.read_text()
    assert text.count("<svg") == 7  # one for each of seven sections
    assert "<td class=n>97.3 [96.8, 97.7]</td>" in text
    assert not re.search(r"(?:src|href)=.?https?://(?!www\.w3\.org)", text.replace("xlink:href", ""))


def test_of_several_seeds_a_scatter_shows_the_first():
    sections = {section.name: section for section in report.build(ROWS)}
    assert len(sections["untrained"].plots) == 1
    assert "AUROC above each panel" in sections["untrained"].plots[0].svg


class TestSeveralRuns:
    def rows(self, *changes):
        base = [
            row("zero-shot", "resnet56", ood, "energy", auroc) for ood, auroc in (("svhn", 90.0), ("cifar100", 80.0))
        ]
        return [
            {**one, "auroc": one["auroc"] + place, **change} for place, change in enumerate(changes) for one in base
        ]

    def test_rows_of_one_run_are_called_by_their_method(self):
        overview, detail = report.build(self.rows({"seed": 3, "limit": 200}))[0].tables
        assert [line[0] for line in overview.rows] == ["Energy"]
        assert {line[1] for line in detail.rows} == {"Energy"}

    def test_seeds_and_limits_are_named_where_they_vary_and_have_lines_of_their_own(self):
        overview, detail = report.build(self.rows({"seed": 0}, {"seed": 1}, {"seed": 0, "limit": 200}))[0].tables
        assert [line[:3] for line in overview.rows] == [
            ("Energy, seed 0", "90.0", "80.0"),
            ("Energy, seed 1", "91.0", "81.0"),
            ("Energy, seed 0, limit 200", "92.0", "82.0"),
        ]
        assert len({(line[0], line[1]) for line in detail.rows}) == len(detail.rows) == 6

    def test_the_seeds_of_random_weights_are_told_apart(self):
        sections = {section.name: section for section in report.build(ROWS)}
        labels = [line[1] for line in sections["untrained"].tables[0].rows]
        assert labels == ["Ours-Avg, batch 8, seed 1", "Ours-Avg, batch 8, seed 0"]

    def test_each_run_of_latency_has_a_table_under_its_own_caption(self):
        slow = {**timed("msp", 20.0, 87.0), "seed": 1, "repeats": 10, "threads": 1}
        first, second = report.build([timed("msp", 10.0, 87.0), {**timed("knn", 11.0, 88.0), "repeats": 10}, slow])[
            0
        ].tables
        assert first.caption.startswith("ResNet-56, CIFAR-10 against CIFAR-100, seed 0; 2 threads, ")
        assert first.caption.endswith("median of 10 to 200 images")
        assert [line[0] for line in first.rows] == ["Plain pass", "MSP", "KNN"]
        assert second.caption.startswith("ResNet-56, CIFAR-10 against CIFAR-100, seed 1; 1 threads, ")
        assert [line[4] for line in second.rows] == ["10.0", "20.0"]

    def test_a_plot_shows_the_largest_limit_and_its_first_seed(self):
        rows = self.rows({"seed": 0, "limit": 100}, {"seed": 2, "limit": 200}, {"seed": 1, "limit": 200})
        shown, words = plots.one_run(rows)
        assert [one["auroc"] for one in shown] == [92.0, 82.0]
        assert words == ", seed 1, limit 200"
        assert plots.one_run([*rows, {**rows[0], "limit": None}])[0][0]["limit"] is None
        assert plots.one_run(rows[:2]) == (rows[:2], "")

    def test_a_ladder_is_not_a_mean_over_runs(self):
        (plot,) = plots.draw("ablation", self.rows({"seed": 0}, {"seed": 1}))
        assert ">85.0<" in plot.svg
        assert "seed 0" in plot.svg

    def test_every_model_has_its_own_plot_of_layers(self):
        layers = [one for one in ROWS if one["experiment"] == "layers"]
        drawn = plots.draw("layers", [*layers, *({**one, "model": "resnet20"} for one in layers)])
        assert [plot.name for plot in drawn] == ["layers", "layers-resnet20-cifar10"]

    def test_the_summary_says_that_some_rows_are_a_quick_look(self):
        assert "A quick look: at most 200 images" in report._summary(self.rows({"limit": 200}))
        assert "Some rows are a quick look: at most 200" in report._summary(self.rows({"limit": 200}, {"limit": None}))


def as_rows(cells, **changes):
    return [
        {
            **row(one.experiment, one.model, one.ood, one.method, one.auroc, inside=one.id, setting=one.setting),
            **changes,
        }
        for one in cells
    ]


class TestNotMeasured:
    def cells(self, experiment):
        return [cell for cell in paper.PRINTED if cell.experiment == experiment]

    def test_nothing_is_said_where_every_cell_has_a_row(self):
        for experiment in {cell.experiment for cell in paper.PRINTED}:
            assert gaps.not_measured(experiment, as_rows(self.cells(experiment))) == ""

    def test_cells_are_grouped_by_model_then_by_set_then_by_method(self):
        there = [
            cell
            for cell in self.cells("transfer")
            if cell.model in ("densenet100", "vgg19") and cell.ood in ("svhn", "textures") and cell.method == "ours-lr"
        ]
        assert gaps.not_measured("transfer", as_rows(there)) == (
            "Not measured here, of the paper's Table 2: ResNet-34, ResNet-34 (self) and ViT; lsun-crop and imagenet-crop with "
            "VGG-19 and DenseNet-100; Ours-MLP with VGG-19 and DenseNet-100."
        )

    def test_a_single_cell_is_named_and_so_are_id_sets_where_there_are_several(self):
        lost = [
            cell
            for cell in self.cells("more-datasets")
            if (cell.id, cell.ood, cell.method) == ("svhn", "cifar10", "odin")
        ]
        assert len(lost) == 1
        rest = [cell for cell in self.cells("more-datasets") if cell not in lost]
        said = gaps.not_measured("more-datasets", as_rows(rest))
        assert said == "Not measured here, of the paper's Table 3: ODIN on CIFAR-10 with ResNet-34 (SVHN as ID)."

    def test_a_stand_in_counts_as_measured(self):
        cells = [cell for cell in self.cells("zero-shot") if cell.ood != "isun"]
        said = gaps.not_measured("zero-shot", as_rows(cells, model="resnet20"))
        assert said == "Not measured here, of the paper's Table 6: iSUN."

    def test_a_table_of_which_nothing_was_measured(self):
        rows = as_rows(self.cells("batch-size"), setting="batch 8")
        assert gaps.not_measured("batch-size", rows) == "Not measured here, of the paper's Sec. 3.2: all of it."

    def test_methods_without_times_are_named(self):
        rows = [timed(line.method, 1.0, 90.0) for line in paper.TIMINGS if line.method not in ("plain", "gram", "good")]
        assert gaps.not_measured("latency", rows) == "Not measured here, of the paper's Table 5: Gram and GOOD."

    def test_it_stands_under_the_experiment(self, markdown):
        assert "Not measured here, of the paper's Table 6: iSUN, Texture, lsun-crop and imagenet-crop;" in markdown

    def test_an_experiment_without_printed_cells_says_nothing(self):
        assert gaps.not_measured("layers", []) == ""


def test_text_from_a_file_is_escaped(tmp_path):
    write_rows(tmp_path / "rows.json", [row("zero-shot", "resnet56", "<script>", "a|b", 50.0)])
    files = report.write(tmp_path / "rows.json", html=tmp_path / "a.html", markdown=tmp_path / "a.md")
    assert "<script>" not in files[0].read_text()
    assert "a\\|b" in files[-1].read_text()


class TestErrors:
    def test_nowhere_to_write_to(self, results):
        with pytest.raises(InputError, match="Expected a path as `html` or `markdown`"):
            report.write(results)

    def test_no_rows(self, tmp_path):
        write_rows(tmp_path / "rows.json", [])
        with pytest.raises(InputError, match=r"but it has none yet. Run `nmd bench run` first"):
            report.write(tmp_path / "rows.json", html=tmp_path / "a.html")

    def test_no_file(self, tmp_path):
        with pytest.raises(ArtefactError, match="Expected a results file"):
            report.write(tmp_path / "rows.json", html=tmp_path / "a.html")

    def test_without_matplotlib_the_cure_is_named(self, results, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingExtraError, match=r"pip install neuralmean\[bench\]"):
            report.write(results, html=tmp_path / "a.html")
